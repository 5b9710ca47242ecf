"""A stack of layers as one tar stream."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from rollserve.errors import SandboxError
from rollserve.sandbox.images.base import OPAQUE, Job
from rollserve.sandbox.images.flat import write_tar


def fill(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def packed(layers: list[Path], *folders: str, job: Job | None = None) -> tarfile.TarFile:
    out = io.BytesIO()
    write_tar(layers, out, ids=(7, 8), folders=folders, job=job or Job())
    out.seek(0)
    return tarfile.open(fileobj=out)


def read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def test_upper_layers_win_and_folders_are_merged(tmp_path: Path) -> None:
    low = fill(tmp_path / "low", {"a/x": "low", "a/y": "low", "b": "file"})
    high = fill(tmp_path / "high", {"a/x": "high", "b/inner": "folder now"})
    archive = packed([low, high])
    assert archive.getnames() == ["a", "b", "b/inner", "a/x", "a/y"]
    assert (read(archive, "a/x"), read(archive, "a/y")) == (b"high", b"low")
    assert {(member.uid, member.gid) for member in archive} == {(7, 8)}


def test_what_is_removed_or_hidden_is_left_out(tmp_path: Path) -> None:
    low = fill(tmp_path / "low", {"gone": "", "kept": "", "hidden/old": ""})
    high = fill(tmp_path / "high", {"hidden/new": ""})
    try:
        os.mknod(high / "gone", 0o020600, 0)
        os.setxattr(high / "hidden", OPAQUE, b"y")
    except OSError as error:
        pytest.skip(f"no whiteouts can be made here: {error}")
    assert sorted(packed([low, high]).getnames()) == ["hidden", "hidden/new", "kept"]


def test_links_are_kept_and_never_followed(tmp_path: Path) -> None:
    root = fill(tmp_path / "root", {"real": "x"})
    (root / "out").symlink_to("/etc/passwd")
    os.link(root / "real", root / "second")
    (root / "real").chmod(0o4755)
    archive = packed([root])
    assert archive.getmember("out").linkname == "/etc/passwd"
    assert archive.getmember("second").islnk()
    assert archive.getmember("real").mode == 0o755


def test_folders_that_must_be_there_and_those_of_the_engine(tmp_path: Path) -> None:
    root = fill(tmp_path / "root", {"proc/1/secret": "", "sys/x": "", "srv/f": ""})
    os.mkfifo(root / "pipe")
    names = packed([root], "/srv/app/deep", "/proc").getnames()
    assert sorted(names) == ["proc", "srv", "srv/app", "srv/app/deep", "srv/f"]


def test_it_ends_when_it_is_stopped(tmp_path: Path) -> None:
    job = Job()
    job.stop.set()
    with pytest.raises(SandboxError, match="stopped"):
        packed([fill(tmp_path / "root", {"f": ""})], job=job)
