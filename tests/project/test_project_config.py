"""Settings: one precedence, precise errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollserve import config
from rollserve.cli.settings import flags
from rollserve.errors import ConfigError


def test_flags_win_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[workers]\ncount = 2\nrun_slots = 2\ninit_slots = 2\n")
    monkeypatch.setenv("ROLLSERVE_WORKERS__RUN_SLOTS", "3")
    monkeypatch.setenv("ROLLSERVE_WORKERS__INIT_SLOTS", "3")
    settings = config.load(config=file, overrides=flags({"workers.init_slots": 4}, []))
    assert settings.workers.count == 2
    assert settings.workers.run_slots == 3
    assert settings.workers.init_slots == 4
    assert settings.workers.grade_slots == 16


def test_a_misspelt_setting_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[workers]\nconut = 2\n")
    with pytest.raises(ConfigError) as caught:
        config.load(config=file)
    assert caught.value.field == "workers.conut"


@pytest.mark.parametrize(
    ("assignment", "field"),
    [("workers.count=0", "workers.count"), ("api.port=70000", "api.port"), ("nothing=1", "nothing")],
)
def test_a_value_out_of_bounds_is_named(assignment: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(overrides=flags({}, [assignment]))
    assert caught.value.field == field


def test_broken_toml_and_a_missing_file_are_config_errors(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[workers\n")
    with pytest.raises(ConfigError):
        config.load(config=broken)
    with pytest.raises(ConfigError, match="no such"):
        config.load(config=tmp_path / "missing.toml")


def test_set_takes_toml_values_and_plain_words() -> None:
    assert flags({}, ["a.b=3", "a.c=[1, 2]", "d=plain", 'e="x"']) == {
        "a": {"b": 3, "c": [1, 2]},
        "d": "plain",
        "e": "x",
    }
    with pytest.raises(ConfigError):
        flags({}, ["novalue"])


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ROLLSERVE_DATADIR", "ROLLSERVE_DATA_DIR"),
        ("ROLLSERVE_WORKERS_COUNT", "ROLLSERVE_WORKERS__COUNT"),
        ("ROLLSERVE_WORKER__COUNT", "ROLLSERVE_WORKERS__COUNT"),
    ],
)
def test_a_misspelt_variable_is_named(variable: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "3")
    with pytest.raises(ConfigError) as caught:
        config.load()
    assert caught.value.field == variable
    assert meant in (caught.value.hint or "")


@pytest.mark.parametrize("variable", ["ROLLSERVE_URL", "ROLLSERVE_API_KEY", "ROLLSERVE_VENV", "ROLLSERVE_X"])
def test_other_variables_are_left_alone(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "3")
    assert config.load().workers.count == 1


@pytest.mark.parametrize(
    ("assignment", "meant"), [("workers.run_slot=3", "workers.run_slots"), ("port=3", "api.port")]
)
def test_the_nearest_setting_is_named(assignment: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="no such setting") as caught:
        config.load(overrides=flags({}, [assignment]))
    assert caught.value.hint == f"did you mean {meant!r}?"
