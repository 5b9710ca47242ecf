"""How things are printed for people, and what an error says to do next."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rollserve.cli.edge import hint_for
from rollserve.cli.output import duration, local_time, table
from rollserve.cli.tasks import read_text
from rollserve.client import Unreachable
from rollserve.errors import ConfigError, InvalidInput, NotFound, RollserveError, Unauthenticated, Unavailable


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-1, "0.0 s"), (0.42, "0.4 s"), (12.4, "12 s"), (180, "3 min"), (7300, "2 h"), (3 * 86400, "3 d")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_times_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-02:00")
    time.tzset()
    assert local_time(0.0) == "1970-01-01 02:00:00+02:00"
    monkeypatch.undo()
    time.tzset()


def test_a_table_cuts_nothing_off(capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["x" * 70, "[bold]y[/bold]" + "y" * 70]
    table(("one", "two"), [cells])
    assert " ".join(capsys.readouterr().out.splitlines()[1].split()) == " ".join(cells)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Unreachable("no answer from http://h", hint="x"), ("rollserve serve", "--url", "ROLLSERVE_URL")),
        (Unavailable("busy"), ("rollserve status",)),
        (Unauthenticated("no"), ("--api-key", "ROLLSERVE_API_KEY")),
        (NotFound("no run 'x'", field="run_id"), ("rollserve run list",)),
        (
            NotFound("no", field="rollout_id", hint="that is the id of a run"),
            ("of a run; ", "status RUN"),
        ),
        (NotFound("no", field="policy", hint="did you mean 'p'?"), ("did you mean 'p'?",)),
        (InvalidInput("no inference server", field="url"), ("rollserve doctor --backend",)),
        (InvalidInput("is no URL", field="url", hint="it looks like …"), ("it looks like",)),
        (ConfigError("no such folder", field="code_dir"), ("--code-dir", "ROLLSERVE_CODE_DIR")),
        (ConfigError("no such settings file", field="config"), ("--config",)),
    ],
)
def test_hints(error: RollserveError, words: tuple[str, ...]) -> None:
    hint = hint_for(error)
    assert hint is not None
    assert all(word in hint for word in words), hint


@pytest.mark.parametrize(
    ("name", "why", "hint"),
    [
        ("task.jsonl", "No such file", "did you mean 'tasks.jsonl'?"),
        ("other", "No such file", "standard input"),
        ("nowhere/tasks.jsonl", "No such file", "there is no folder"),
        (".", "Is a directory", "standard input"),
        ("tasks.jsonl", "it is no text", None),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, why: str, hint: str | None) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=why) as caught:
        read_text(tmp_path / name)
    assert caught.value.hint is None if hint is None else hint in str(caught.value.hint)
