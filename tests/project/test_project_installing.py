"""What is said of something that is not installed can be typed, and fetches nobody else's package."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollserve import installing

ROOT = Path(__file__).parents[2]


def checkout(folder: Path) -> Path:
    (folder / "scripts").mkdir()
    (folder / "scripts" / "setup").touch()
    return folder


def test_in_a_checkout_it_is_its_own_script(tmp_path: Path) -> None:
    source = checkout(tmp_path)
    assert installing.extra("math", source=source, prefix=str(source / ".venv")) == "./scripts/setup math"


def test_another_environment_of_a_checkout_takes_its_folder(tmp_path: Path) -> None:
    said = installing.extra("mcp", source=checkout(tmp_path), prefix="/opt/mine")
    assert said == f"/opt/mine/bin/python -m pip install -e '{tmp_path}[mcp]'"


def test_without_a_checkout_it_is_what_the_extra_holds(tmp_path: Path) -> None:
    said = installing.extra("math", source=tmp_path, prefix="/opt/mine")
    assert said.startswith("/opt/mine/bin/python -m pip install 'math-verify>=")
    assert "rollserve[" not in said


@pytest.mark.parametrize("suffix", ["*.py", "*.md"])
def test_nobody_is_told_to_fetch_it_from_an_index(suffix: str) -> None:
    own = ROOT / "src" / "rollserve" / "installing.py"
    told = [
        str(path.relative_to(ROOT))
        for folder in ("src", "docs")
        for path in (ROOT / folder).rglob(suffix)
        if path != own and "pip install 'rollserve" in path.read_text()
    ]
    assert told == []
