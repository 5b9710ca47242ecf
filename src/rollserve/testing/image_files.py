"""Images made in memory, for tests: layers as tar archives, whole images as OCI archives and layouts."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from rollserve.sandbox.images.oci import machine

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class Member:
    """One entry of a tar archive; ``kind`` as ``tarfile`` has it."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    link: str = ""


def folder(name: str, mode: int = 0o755) -> Member:
    return Member(name, kind=tarfile.DIRTYPE, mode=mode)


def symlink(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.SYMTYPE, link=target)


def hardlink(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.LNKTYPE, link=target)


def tar_of(members: Iterable[Member], *, format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size, info.mode, info.type = len(member.data), member.mode, member.kind
            info.linkname, info.mtime = member.link, 1_000_000_000
            archive.addfile(info, io.BytesIO(member.data))
    return out.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def packed(data: bytes, compression: str) -> bytes:
    if compression == "gzip":
        return gzip.compress(data, 1)
    return zstandard.compress(data, 1) if compression == "zstd" else data


@dataclass
class TestImage:
    """Blobs by digest; ``manifest`` is the descriptor of what to start from."""

    __test__ = False

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    def add(self, data: bytes, media_type: str) -> dict[str, Any]:
        self.blobs[digest(data)] = data
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    def layout_files(self, tag: str = "latest") -> dict[str, bytes]:
        named = {**self.manifest, "annotations": {"org.opencontainers.image.ref.name": tag}}
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]}
        files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode()}
        return files | {f"blobs/{name.replace(':', '/')}": data for name, data in self.blobs.items()}

    def write_archive(self, path: Path, tag: str = "latest") -> Path:
        path.write_bytes(tar_of(Member(name, data) for name, data in self.layout_files(tag).items()))
        return path

    def write_layout(self, folder: Path, tag: str = "latest") -> Path:
        for name, data in self.layout_files(tag).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder


def make_image(
    layers: Iterable[bytes],
    *,
    settings: Mapping[str, Any] | None = None,
    compression: str = "gzip",
    diff_ids: list[str] | None = None,
    with_index: bool = False,
) -> TestImage:
    """``settings`` is the image's ``config`` (``Env``, ``WorkingDir``, ``User``)."""
    image = TestImage()
    archives = list(layers)
    descriptors = [image.add(packed(data, compression), LAYER) for data in archives]
    configuration = {
        "architecture": machine(),
        "os": "linux",
        "config": dict(settings or {}),
        "rootfs": {"type": "layers", "diff_ids": diff_ids or [digest(data) for data in archives]},
    }
    config = image.add(json.dumps(configuration).encode(), CONFIG)
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": descriptors}
    image.manifest = image.add(json.dumps(manifest).encode(), MANIFEST)
    if with_index:
        here = {**image.manifest, "platform": {"os": "linux", "architecture": machine()}}
        other = {
            **image.manifest,
            "digest": digest(b"another"),
            "platform": {"os": "linux", "architecture": "mips"},
        }
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [other, here]}
        image.manifest = image.add(json.dumps(index).encode(), INDEX)
    return image


def saved_archive(path: Path, layers: Iterable[bytes], tag: str) -> Path:
    """As ``docker save`` of old wrote it."""
    archives = list(layers)
    configuration = json.dumps(
        {"config": {"Env": ["A=1"]}, "rootfs": {"diff_ids": [digest(data) for data in archives]}}
    ).encode()
    config = f"{digest(configuration).removeprefix('sha256:')}.json"
    names = [f"{number:064x}/layer.tar" for number in range(len(archives))]
    manifest = json.dumps([{"Config": config, "RepoTags": [tag], "Layers": names}]).encode()
    members = [Member(config, configuration)]
    members += [Member(name, data) for name, data in zip(names, archives, strict=True)]
    path.write_bytes(tar_of([*members, Member("manifest.json", manifest)]))
    return path


def small_root(programs: Iterable[str]) -> list[Member]:
    """A root file system of this machine's ``programs`` and the libraries they need."""
    members = {name: folder(name) for name in ("bin", "etc", "root", "tmp")}
    members["etc/passwd"] = Member(
        "etc/passwd", b"root:x:0:0::/root:/bin/sh\nbuilder:x:1000:1000::/root:/bin/sh\n"
    )
    for program in programs:
        source = shutil.which(program)
        assert source is not None, program
        members[f"bin/{program}"] = Member(f"bin/{program}", Path(source).read_bytes(), mode=0o755)
        listing = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", listing):
            name = library.lstrip("/")
            members.setdefault(name, Member(name, Path(library).read_bytes(), mode=0o755))
    return list(members.values())


ROOT_PROGRAMS = (
    "bash", "sh", "awk", "base64", "cat", "chmod", "cmp", "cut", "dd", "dirname", "env", "grep",
    "head", "id", "ln", "ls", "mkdir", "mkfifo", "mount", "mv", "nohup", "od", "readlink", "rm", "sed",
    "seq", "setsid", "sleep", "stat", "tail", "tar", "touch", "tr", "unshare", "wc", "yes",
)  # fmt: skip
"""All that the conformance suite of runtimes calls."""


def make_root(root: Path, programs: Iterable[str] = ROOT_PROGRAMS) -> Path:
    """A folder as an image: ``programs`` of this machine, as far as it has them."""
    for member in small_root(program for program in programs if shutil.which(program)):
        place = root / member.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if member.kind == tarfile.DIRTYPE:
            place.mkdir(exist_ok=True)
        else:
            place.write_bytes(member.data)
            place.chmod(member.mode)
    (root / "root").rmdir()
    (root / "usr").mkdir(exist_ok=True)
    (root / "etc" / "motd").write_text("image\n")
    return root
