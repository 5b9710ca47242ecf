"""The table of harnesses: every row can be run as it says, and is checked before anything starts."""

from __future__ import annotations

import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollserve.agent.command import VALUES, filled
from rollserve.agent.harness.base import MOUNT, Dialect, Harness, HarnessOptions, mounts_of, program_of
from rollserve.agent.harness.install import Steps, install
from rollserve.agent.harness.table import HARNESSES
from rollserve.agent.registry import built_in
from rollserve.dialect.clients import CLIENTS, NAME_HEADER
from rollserve.errors import ConfigError, InvalidInput

SPOKEN = {name: f"<{name}>" for name in VALUES} | {"context_tokens": "1000", "max_tokens": "10", "model": "m"}
EACH = pytest.mark.parametrize("harness", HARNESSES.values(), ids=list(HARNESSES))


def installed(folder: Path, harness: Harness) -> Path:
    """As the installer leaves it."""
    place = folder / harness.folder
    (place / "bin").mkdir(parents=True)
    (place / "bin" / harness.program).write_text("#!/bin/sh\n")
    return place


@EACH
def test_versions_are_pinned(harness: Harness) -> None:
    packages = [*harness.install.npm, *harness.install.pip]
    assert packages
    assert all(re.search(r"[^@=](@|==)\d[\w.]*$", package) for package in packages)
    assert any(package.endswith(harness.version) for package in packages)


@EACH
def test_settings_files_are_well_formed_and_name_the_session(harness: Harness) -> None:
    for dialect in harness.wires:
        program = program_of(harness, HarnessOptions(dialect=dialect))
        for path, text in program.files.items():
            made = filled(text, SPOKEN)
            if path.endswith(".json"):
                json.loads(made)
            elif path.endswith(".toml"):
                tomllib.loads(made)
        everything = [program.command, *program.env.values(), *program.files.values()]
        assert any("{base_url}" in text or "{session_url}" in text for text in everything)
        assert any("{api_key}" in text for text in everything)
        assert any("{instruction" in text for text in everything)
        assert harness.program in program.needs
        assert program.command.startswith(f"{harness.program} ")


@EACH
def test_it_is_mounted_where_it_is_installed_and_wanted(harness: Harness, tmp_path: Path) -> None:
    entry = built_in(tmp_path)[harness.name]
    assert entry.acts_inside
    assert entry.mounts({}) == {}
    with pytest.raises(InvalidInput) as caught:
        entry.check({"provide": "mount"})
    assert caught.value.field == "agent.options.provide"
    assert f"--into {tmp_path} {harness.name}" in str(caught.value.hint)
    assert entry.programs({}) == (harness.program,)
    place = installed(tmp_path, harness)
    entry.check({"provide": "mount"})
    assert entry.mounts({}) == {MOUNT: str(place)}
    assert entry.programs({}) == ()
    assert entry.mounts({"provide": "image"}) == {}
    assert entry.programs({"provide": "image"}) == (harness.program,)


def test_without_a_folder_nothing_is_mounted() -> None:
    assert mounts_of(HARNESSES["pi"], HarnessOptions(), None) == {}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dialect": "chat"}, "dialect"),
        ({"dialect": "telegraph"}, "dialect"),
        ({"provide": "magic"}, "provide"),
        ({"promt": 1}, "promt"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        built_in()["codex"].check(options)
    assert caught.value.field == f"agent.options.{field}"


def test_options_add_to_a_row() -> None:
    options = HarnessOptions(arguments="--tools read", env={"PI_OFFLINE": "0", "A": "b"}, files={"x": "y"})
    program = program_of(HARNESSES["pi"], options)
    assert program.command.endswith("{instruction} --tools read")
    assert program.env == {"PI_OFFLINE": "0", "A": "b"}
    assert set(program.files) == {"~/.pi/agent/models.json", "x"}


@pytest.mark.parametrize("name", ["pi", "mini-swe-agent"])
def test_those_who_don_t_say_who_they_are_are_told_to(name: str) -> None:
    for dialect in HARNESSES[name].wires:
        program = program_of(HARNESSES[name], HarnessOptions(dialect=dialect))
        told = " ".join([program.command, *program.files.values()])
        assert re.search(rf'{NAME_HEADER}["=: ]+{name}', told)


def test_each_is_known_as_a_client() -> None:
    """So that it meets the statuses that were measured with it."""
    assert set(HARNESSES) <= set(CLIENTS)


def test_each_dialect_is_spoken_by_some_harness() -> None:
    assert {dialect for row in HARNESSES.values() for dialect in row.wires} == set(Dialect)


def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    said: list[str] = []
    harness = HARNESSES["pi"]
    place = installed(tmp_path, harness)
    (place / ".installed").write_text(repr(harness.install))
    assert install(harness, tmp_path, said.append) == place
    assert said == ["pi-1.6.0: installed already"]


def test_an_installation_ends_in_its_time_with_what_it_started(tmp_path: Path) -> None:
    script = "sleep 600 & echo $! > child; echo $$ > self; wait"
    with pytest.raises(ConfigError, match="did not end in the time that was left"):
        Steps(1.5).run(["sh", "-c", script], tmp_path)
    pids = [(tmp_path / name).read_text().strip() for name in ("self", "child")]
    until = time.monotonic() + 20.0  # a signal takes its time to be acted on
    while any(map(_runs, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(_runs, pids))


def _runs(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_step_that_fails_says_its_last_words(tmp_path: Path) -> None:
    steps = Steps(60.0)
    with pytest.raises(ConfigError, match="ended with 3:\nno such package"):
        steps.run(["sh", "-c", "echo no such package >&2; exit 3"], tmp_path)
    with pytest.raises(ConfigError, match="no-such-program"):
        steps.run(["no-such-program"], tmp_path)


def test_an_interrupted_copy_of_python_is_made_anew(tmp_path: Path) -> None:
    python = tmp_path / "prefix" / "bin" / "python3.11"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n[ $1 != -c ] || echo 3 11 {tmp_path}/prefix {python}\n")
    python.chmod(0o755)
    (python.parent / "python3").symlink_to("python3.11")
    harness = HARNESSES["mini-swe-agent"]
    begun = tmp_path / "into" / harness.folder / "python" / "bin"
    begun.mkdir(parents=True)
    (begun / "python3").symlink_to("python3.11")
    place = install(harness, tmp_path / "into", lambda _: None, python=str(python))
    assert (place / ".installed").read_text() == repr(harness.install)
    assert (begun / "python3").resolve() == begun / "python3.11"
