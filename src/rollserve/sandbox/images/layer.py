"""Writing a layer's folder: every step goes from an open folder to an entry of it, and no link is followed,
so that no archive can reach beside the layer.

What is treated rather than kept, since a sandbox has one user and no privileges: everything is owned by that
user; set-user-id and set-group-id bits are dropped; the owner may always read and write a file and enter a
folder, as root may; times of folders and extended attributes are not taken over.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from rollserve.sandbox.images.base import OPAQUE, bad_image
from rollserve.sandbox.images.stack import Stack, is_whiteout

ENTRY_BYTES = 4096
"""What an entry counts beside its content."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_BYTES = 1 << 20

MAX_PATH_CHARS = 4000

Parts = tuple[str, ...]


class LayerWriter:
    """Fills ``root``, a fresh folder. ``owner`` is the user to give everything to, None where that is this
    process's; ``lower`` what lies below; ``budget_bytes`` what the layer may take. Not thread-safe."""

    def __init__(self, root: Path, *, owner: int | None, lower: Stack, budget_bytes: int) -> None:
        self._owner = owner
        self._lower = lower
        self._budget = budget_bytes
        self._root_fd = os.open(root, _FOLDER_FLAGS)
        self._at: Parts = ()
        self._at_fd = self._root_fd
        self.size_bytes = 0
        self._finish_folder(self._root_fd, 0o755)

    def __enter__(self) -> LayerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        os.close(self._root_fd)

    # -- entries ------------------------------------------------------------------------------

    def file(self, parts: Parts, data: Iterable[bytes], *, size_bytes: int, mode: int, mtime: float) -> None:
        self._charge(size_bytes)
        parent, name = self._place(parts)
        fd = self._create(name, parent)
        try:
            for part in data:
                _write_all(fd, part)
            if self._owner is not None:
                os.fchown(fd, self._owner, self._owner)
            os.fchmod(fd, mode & 0o777 | 0o600)
            os.utime(fd, (mtime, mtime))
        finally:
            os.close(fd)

    def folder(self, parts: Parts, mode: int) -> None:
        self._charge(0)
        if not parts:
            self._finish_folder(self._root_fd, mode | 0o555)
            return
        parent, name = self._place(parts)
        info = _lstat(name, parent)
        if info is None or not stat.S_ISDIR(info.st_mode):
            self._make_folder(name, parent, mode, hides=info is not None and is_whiteout(info))
            return
        fd = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
        try:
            self._finish_folder(fd, mode)
        finally:
            os.close(fd)

    def symlink(self, parts: Parts, target: str, mtime: float) -> None:
        self._charge(len(target))
        if not target or "\0" in target:
            raise bad_image("a symbolic link that leads nowhere")
        parent, name = self._place(parts)
        self._clear(name, parent)
        os.symlink(target, name, dir_fd=parent)
        self._finish_special(name, parent, mtime)

    def fifo(self, parts: Parts, mode: int, mtime: float) -> None:
        self._charge(0)
        parent, name = self._place(parts)
        self._clear(name, parent)
        os.mkfifo(name, mode & 0o777 | 0o600, dir_fd=parent)
        self._finish_special(name, parent, mtime)

    def hardlink(self, parts: Parts, target: Parts) -> None:
        """To a file of this layer; one of a layer below is copied, as an overlay would."""
        self._charge(0)
        if target == parts:
            raise bad_image("a hard link to itself")
        source = self._open_parent(target)
        try:
            info = None if source is None else _lstat(target[-1], source)
            if source is None or info is None:
                self._copy_up(parts, target)
                return
            if not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                raise bad_image(f"a hard link to {'/'.join(target)}, which is no file")
            parent, name = self._place(parts)
            self._clear(name, parent)
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            if source is not None:
                os.close(source)

    def whiteout(self, parts: Parts) -> None:
        """Hide what the layers below have there; what this layer has there stays."""
        self._charge(0)
        parent, name = self._place(parts)
        info = _lstat(name, parent)
        if info is None:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=parent)
            self._finish_special(name, parent, None)
        elif stat.S_ISDIR(info.st_mode):
            self.opaque(parts)

    def opaque(self, parts: Parts) -> None:
        """Hide all that the layers below have in that folder."""
        self._charge(0)
        fd = self._root_fd if not parts else self._enter(parts)
        os.setxattr(fd, OPAQUE, b"y")

    # -- places -------------------------------------------------------------------------------

    def _place(self, parts: Parts) -> tuple[int, str]:
        if not parts:
            raise bad_image("an entry that would replace the root folder")
        return self._enter(parts[:-1]), parts[-1]

    def _enter(self, parts: Parts) -> int:
        """An open folder of the layer, made where it is missing; kept open until the next."""
        if parts == self._at:
            return self._at_fd
        self._leave()
        fd = self._root_fd
        for depth in range(1, len(parts) + 1):
            try:
                inner = self._step(parts[:depth], fd)
            finally:
                if fd != self._root_fd:
                    os.close(fd)
            fd = inner
        self._at, self._at_fd = parts, fd
        return fd

    def _leave(self) -> None:
        if self._at_fd != self._root_fd:
            os.close(self._at_fd)
        self._at, self._at_fd = (), self._root_fd

    def _step(self, parts: Parts, parent: int) -> int:
        name = parts[-1]
        try:
            return os.open(name, _FOLDER_FLAGS, dir_fd=parent)
        except FileNotFoundError:
            self._charge(0)
            below = self._lower.find(parts)
            mode = stat.S_IMODE(below.info.st_mode) if below is not None and below.is_folder else 0o755
            self._make_folder(name, parent, mode, hides=False)
        except OSError as error:
            info = _lstat(name, parent)
            if info is None or not is_whiteout(info):
                raise bad_image(
                    f"a path that goes through {'/'.join(parts)}, which is no folder of the layer"
                ) from error
            self._make_folder(name, parent, 0o755, hides=True)
        return os.open(name, _FOLDER_FLAGS, dir_fd=parent)

    def _open_parent(self, parts: Parts) -> int | None:
        """The folder that holds ``parts``; None where this layer has no such folder."""
        fd = os.dup(self._root_fd)
        for name in parts[:-1]:
            try:
                inner = os.open(name, _FOLDER_FLAGS, dir_fd=fd)
            except OSError:
                return None
            finally:
                os.close(fd)
            fd = inner
        return fd

    def _create(self, name: str, parent: int) -> int:
        try:
            return os.open(name, _WRITE_FLAGS, 0o600, dir_fd=parent)
        except FileExistsError:
            self._clear(name, parent)
            return os.open(name, _WRITE_FLAGS, 0o600, dir_fd=parent)

    def _make_folder(self, name: str, parent: int, mode: int, *, hides: bool) -> None:
        """``hides`` says that a whiteout stands there: the folder then begins empty."""
        self._clear(name, parent)
        os.mkdir(name, 0o700, dir_fd=parent)
        fd = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
        try:
            if hides:
                os.setxattr(fd, OPAQUE, b"y")
            self._finish_folder(fd, mode)
        finally:
            os.close(fd)

    def _clear(self, name: str, parent: int) -> None:
        info = _lstat(name, parent)
        if info is None:
            return
        if stat.S_ISDIR(info.st_mode):
            shutil.rmtree(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)

    def _copy_up(self, parts: Parts, target: Parts) -> None:
        below = self._lower.find(target)
        if below is None or not below.is_file:
            raise bad_image(f"a hard link to {'/'.join(target)}, which is no file of the image")
        fd = os.open(below.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            pieces = iter(lambda: file.read(_COPY_BYTES), b"")
            info = below.info
            mode = stat.S_IMODE(info.st_mode)
            self.file(parts, pieces, size_bytes=info.st_size, mode=mode, mtime=info.st_mtime)

    # -- attributes ---------------------------------------------------------------------------

    def _finish_folder(self, fd: int, mode: int) -> None:
        if self._owner is not None:
            os.fchown(fd, self._owner, self._owner)
        os.fchmod(fd, mode & 0o1777 | 0o700)

    def _finish_special(self, name: str, parent: int, mtime: float | None) -> None:
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=parent, follow_symlinks=False)
        if mtime is not None:
            os.utime(name, (mtime, mtime), dir_fd=parent, follow_symlinks=False)

    def _charge(self, size_bytes: int) -> None:
        self.size_bytes += ENTRY_BYTES + size_bytes
        if self.size_bytes > self._budget:
            raise bad_image(
                f"it unpacks to more than {self._budget >> 20} MiB, all that images may take",
                hint="raise images.max_gb",
            )


def _lstat(name: str, parent: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def checked_parts(name: str) -> Parts:
    """Components of a member's name. Raises ``SandboxError`` for one that leaves the archive's root."""
    if name.startswith("/"):
        raise bad_image("an absolute path")
    if "\0" in name or len(name) > MAX_PATH_CHARS:
        raise bad_image("a path with a NUL byte, or of too many characters")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise bad_image("a path with ..")
    return parts
