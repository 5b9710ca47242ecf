from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput
from rollserve.store import task_file
from rollserve.store.task_file import open_task_file


def test_lines_are_numbered_as_an_editor_does_and_empty_ones_are_none(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'\n{"a": 1}\r\n  \n{"b": "\xc3\xa4"}\n\n[3]')
    tasks = open_task_file(tmp_path, "t.jsonl")
    assert tasks.lines == 3
    assert [tasks.read(index)[0] for index in range(3)] == ["line 2", "line 4", "line 6"]
    assert tasks.read(1)[1].strip() == '{"b": "ä"}'.encode()
    assert tasks.read(2)[1] == b"[3]"


def test_another_content_has_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("1\n")
    before = open_task_file(tmp_path, "t.jsonl").digest
    path.write_text("2\n")
    assert open_task_file(tmp_path, "t.jsonl").digest != before


def test_only_inside_the_folder(tmp_path: Path) -> None:
    folder, secret = tmp_path / "sources", tmp_path / "secret"
    (folder / "deep").mkdir(parents=True)
    secret.write_text("1\n")
    (folder / "deep" / "t.jsonl").write_text("1\n")
    (folder / "link").symlink_to(secret)
    assert open_task_file(folder, "deep/t.jsonl").lines == 1
    for name in ("../secret", str(secret), "link", "deep", "nothing", "deep/../../secret"):
        with pytest.raises(InvalidInput) as caught:
            open_task_file(folder, name)
        assert caught.value.field == "source.path"
    with pytest.raises(InvalidInput, match="reads no task files"):
        open_task_file(None, "t.jsonl")


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_file, "MAX_LINE_BYTES", 10)
    (tmp_path / "t.jsonl").write_text("1\n" + "x" * 20 + "\n2\n")
    tasks = open_task_file(tmp_path, "t.jsonl")
    with pytest.raises(InvalidInput, match="line 2"):
        tasks.read(1)
    assert tasks.read(2)[1] == b"2\n"


def test_a_file_that_goes_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("1\n")
    tasks = open_task_file(tmp_path, "t.jsonl")
    os.unlink(tmp_path / "t.jsonl")
    with pytest.raises(InvalidInput, match="line 1"):
        tasks.read(0)
