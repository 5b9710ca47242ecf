"""From an image to what bubblewrap mounts: overlays whose lower folders are the image, and what stays fixed.

An image of the cache is one overlay at ``/``. The host, and a folder that another user owns, are an overlay
for each folder at the top, since the sandbox's own mount points could not be made in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollserve.errors import SandboxError
from rollserve.sandbox.base import WORKDIR
from rollserve.sandbox.image import HOST, ROOT_BYTES
from rollserve.sandbox.images.base import Image, ImageConfig, bad_image
from rollserve.sandbox.images.bench import Writes
from rollserve.sandbox.images.stack import Stack

_HOST_ENTRIES = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_OWN_MOUNTS = frozenset({"proc", "dev", "sys", "tmp", "run", "workspace", "lost+found"})
_NEEDED = ("proc", "dev", "tmp", "workspace")
_SHELLS = ("bin/sh", "usr/bin/sh")
_RESOLVER = "etc/resolv.conf"


@dataclass(frozen=True)
class Overlay:
    """Mounted at ``place``; ``folders`` bottom first."""

    place: str
    folders: tuple[str, ...]


@dataclass(frozen=True)
class Rootfs:
    """``fixed`` are arguments that come before the overlays'. ``workspace`` says that the image has something
    in the default working directory, so that nothing is to be mounted over it, ``keeps_tmp`` the same of
    ``/tmp``. ``ids`` are user and group
    inside, None for those outside; ``resolver`` that ``/etc/resolv.conf`` may be mounted there."""

    overlays: tuple[Overlay, ...]
    fixed: tuple[str, ...] = ()
    workspace: bool = False
    keeps_tmp: bool = False
    workdir: str = WORKDIR
    env: Mapping[str, str] = field(default_factory=dict)
    ids: tuple[int, int] | None = None
    resolver: bool = False
    shows_host: bool = False


def rootfs_of(
    image: Image, layers: Sequence[Path], *, uid: int, overlays: bool, empty: Path, writes: bool = False
) -> Rootfs:
    """``layers`` are the folders of the image's layers, ``uid`` is who owns them, ``overlays`` whether this
    machine can mount such, ``empty`` a folder that is; with ``writes`` what is written is kept, in the
    working directory too. Blocking. Raises ``SandboxError``."""
    if layers and not overlays:
        raise bad_image("images of the cache need overlays, which this machine can't mount as a user")
    if not image.base:
        return _stacked(image.config, layers, writes=writes)
    if image.base != HOST and overlays and Path(image.base).stat().st_uid == uid:
        folders = (image.base, *map(str, layers))
        workspace = writes or _has_workspace(layers)
        return Rootfs((Overlay("/", folders),), workspace=workspace, keeps_tmp=image.config.keeps_tmp)
    return _by_entry(image, layers, overlays=overlays, empty=empty, writes=writes)


def _stacked(config: ImageConfig, layers: Sequence[Path], *, writes: bool) -> Rootfs:
    stack = Stack(layers)
    if not any(stack.exists(shell) for shell in _SHELLS):
        raise bad_image("the image holds no /bin/sh")
    for name in _NEEDED:
        found = stack.find((name,))
        if found is not None and not found.is_folder:
            raise bad_image(f"the image's /{name} is no folder, and a sandbox mounts its own there")
    user, group, home = user_of(config.user, stack)
    env = {"HOME": home, **config.env} if home and stack.exists(home) else dict(config.env)
    resolver = stack.find(tuple(_RESOLVER.split("/")))
    return Rootfs(
        (Overlay("/", tuple(map(str, layers))),),
        workspace=writes or _has_workspace(layers),
        keeps_tmp=config.keeps_tmp,
        workdir=_workdir(config.workdir, stack),
        env=env,
        ids=(user, group),
        resolver=resolver is None or resolver.is_file,
    )


def _workdir(said: str, stack: Stack) -> str:
    """Without links: bubblewrap would follow them before the image is the root."""
    if said in ("", "/"):
        return WORKDIR
    parts = stack.resolve(said)
    found = stack.find(parts)
    if not parts or (found is not None and not found.is_folder):
        raise bad_image(f"the image's working directory {said} is no folder")
    return "/" + "/".join(parts)


def user_of(said: str, stack: Stack) -> tuple[int, int, str]:
    """User, group and home of ``NAME-OR-NUMBER[:GROUP]``, by the image's own lists. Raises
    ``SandboxError``."""
    name, _, group = said.partition(":")
    for line in _lines(stack, "/etc/passwd"):
        if len(line) >= 6 and (name or "0") in (line[0], line[2]) and line[2].isdigit() and line[3].isdigit():
            return int(line[2]), _group_of(group, int(line[3]), stack), line[5]
    if name and not name.isdigit():
        raise bad_image(f"the image has no user {name!r}, as whom it wants to run")
    number = int(name or 0)
    return number, _group_of(group, number, stack), "/root" if number == 0 else ""


def _group_of(said: str, otherwise: int, stack: Stack) -> int:
    if not said or said.isdigit():
        return int(said or otherwise)
    for line in _lines(stack, "/etc/group"):
        if len(line) >= 3 and line[0] == said and line[2].isdigit():
            return int(line[2])
    raise bad_image(f"the image has no group {said!r}, as which it wants to run")


def _lines(stack: Stack, path: str) -> Iterator[list[str]]:
    data = stack.read(path) or b""
    for line in data.decode(errors="replace").splitlines():
        yield line.split(":")


def _by_entry(image: Image, layers: Sequence[Path], *, overlays: bool, empty: Path, writes: bool) -> Rootfs:
    base, keeps_tmp = image.base, image.config.keeps_tmp
    root = Path("/" if base == HOST else base)
    names = _HOST_ENTRIES if base == HOST else tuple(sorted(os.listdir(root)))
    fixed = ["--size", str(ROOT_BYTES), "--tmpfs", "/"]
    places: list[Overlay] = []
    for name in names:
        source, place = root / name, f"/{name}"
        if name in _OWN_MOUNTS:
            continue
        if source.is_symlink():
            fixed += ["--symlink", os.readlink(source), place]
        elif source.is_dir() and overlays:
            places.append(Overlay(place, (str(source), *_parts(layers, name))))
        elif source.is_dir() or source.is_file():
            fixed += ["--ro-bind", str(source), place]
    workspace = writes or _has_workspace(layers)
    if workspace:
        places.append(Overlay(WORKDIR, (str(empty), *_parts(layers, WORKDIR[1:]))))
    if keeps_tmp:
        places.append(Overlay("/tmp", (str(empty), *_parts(layers, "tmp"))))
    return Rootfs(
        tuple(places),
        fixed=tuple(fixed),
        workspace=workspace,
        keeps_tmp=keeps_tmp,
        shows_host=base == HOST,
    )


def _parts(layers: Sequence[Path], name: str) -> tuple[str, ...]:
    return tuple(str(layer / name) for layer in layers if (layer / name).is_dir())


def _has_workspace(layers: Sequence[Path]) -> bool:
    return any(_is_filled(layer / WORKDIR[1:]) for layer in layers)


def _is_filled(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SandboxError(f"{folder} can't be read: {error}", operation="image") from error


def mount_arguments(rootfs: Rootfs, writes: Writes | None, *, owner: int | None) -> list[str]:
    """bubblewrap's arguments for the root file system; the folders of ``writes`` are made, for ``owner``."""
    arguments = list(rootfs.fixed)
    for number, overlay in enumerate(rootfs.overlays):
        for folder in overlay.folders:
            arguments += ["--overlay-src", folder]
        if writes is None:
            arguments += ["--tmp-overlay", overlay.place]
            continue
        upper = writes.upper / overlay.place.lstrip("/")
        work = writes.work / str(number)
        for place in (upper, work):
            if not place.is_dir():
                place.mkdir(mode=0o755)
                if owner is not None:
                    os.chown(place, owner, owner)
        arguments += ["--overlay", str(upper), str(work), overlay.place]
    return arguments
