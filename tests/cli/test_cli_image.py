"""``rollserve image`` as a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollserve.sandbox.registry import make_runtime
from rollserve.testing.image_files import Member, make_image, small_root, tar_of
from tests.cli.test_cli_commands import as_json, rollserve


async def test_add_list_and_prune(open_dir: Path) -> None:
    archive = make_image([tar_of([Member("a", b"x" * 100_000)])]).write_archive(open_dir / "i.tar")
    at = ("--data-dir", str(open_dir / "data"))
    added = await as_json("image", "add", "i.tar", "--name", "mine", *at, cwd=open_dir)
    assert (added["names"], added["references"]) == (["mine"], [str(archive)])
    code, text, progress = await rollserve("image", "add", str(archive), *at)
    assert code == 0
    assert text.startswith(f"sha256:{added['id'][:12]}: 0.1 MB in 1 layer")
    assert progress == ""
    listed = await as_json("image", "list", *at)
    assert [one["id"] for one in listed["images"]] == [added["id"]]
    assert listed["used_bytes"] == added["size_bytes"]
    code, text, _ = await rollserve("image", "list", *at)
    assert "mine" in text
    assert "1 image, 0.1 MB of 50.0 GB" in text
    assert await as_json("image", "prune", *at) == {"removed": 0, "freed_bytes": 0}
    assert await as_json("image", "prune", "--all", *at) == {
        "removed": 1,
        "freed_bytes": added["size_bytes"],
    }


async def test_progress_is_on_stderr(open_dir: Path) -> None:
    layers = [tar_of([Member(name)]) for name in "ab"]
    archive = make_image(layers).write_archive(open_dir / "i.tar")
    code, text, progress = await rollserve("image", "add", str(archive), "--data-dir", str(open_dir / "d"))
    assert code == 0
    assert "layer" not in text.splitlines()[0].split(":")[0]
    assert "layer 1 of 2" in progress
    assert "layer 2 of 2" in progress


@pytest.mark.userns
async def test_build(open_dir: Path) -> None:
    if not make_runtime("bubblewrap", open_dir).report().usable:
        pytest.skip("bubblewrap can't be used here")
    (open_dir / "root.tar").write_bytes(tar_of(small_root(("sh", "cat"))))
    (open_dir / "env").mkdir()
    (open_dir / "env" / "note").write_text("hi")
    (open_dir / "env" / "Dockerfile").write_text(
        f"FROM {open_dir}/root.tar\nARG WHO\nCOPY note /note\nRUN cat /note; echo $WHO > /who\nWORKDIR /srv\n"
    )
    at = ("--data-dir", str(open_dir / "data"))
    built = await as_json(
        "image", "build", "env", "--build-arg", "WHO=me", "--name", "env", *at, cwd=open_dir
    )
    assert (built["layers"], built["workdir"], built["names"]) == (3, "/srv", ["env"])
    code, _, text = await rollserve("image", "build", "env", "--build-arg", "NO=1", *at, cwd=open_dir)
    assert code == 1
    assert "the recipe has no ARG NO" in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("add", "nothing"), "no image 'nothing' in the cache"),
        (("add", "host"), "needs no place in the cache"),
        (("add", "/nowhere.tar"), "neither a folder nor a file"),
        (("add", "i.tar", "--name", "a/b"), "no name for an image"),
        (("build", "missing"), "can't be read"),
        (("build", ".", "--build-arg", "x"), "--build-arg wants NAME=VALUE"),
    ],
)
async def test_errors_are_one_line(open_dir: Path, arguments: tuple[str, ...], why: str) -> None:
    code, _, text = await rollserve("image", *arguments, "--data-dir", str(open_dir / "data"), cwd=open_dir)
    assert code == 1
    assert why in " ".join(text.split())
    assert "Traceback" not in text
