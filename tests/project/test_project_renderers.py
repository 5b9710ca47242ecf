"""The renderers that policies can name stand in the docs, with their options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from renderers import configs

ROOT = Path(__file__).parents[2]
NAMES = sorted(set(configs._CONFIG_BY_NAME) - {"auto"})
ALL_HAVE = {"name", "thinking_retention"}


def rows() -> dict[str, str]:
    """The table's options, as they stand there, by name; "the same" is the row above."""
    text = (ROOT / "docs/backends.md").read_text().partition("## Renderers")[2].partition("## Templates")[0]
    found: dict[str, str] = {}
    above = ""
    for names, options in re.findall(r"^\| (`.*?) \| (.*?) ?\|$", text, flags=re.M):
        above = options.replace("the same", above)
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", names), above)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_its_options_are_documented(name: str) -> None:
    said = set(re.findall(r"`([a-z_]+)`", re.sub(r"\([^)]*\)", "", rows()[name])))
    assert said == set(configs._CONFIG_BY_NAME[name].model_fields) - ALL_HAVE


def test_no_other_is_documented() -> None:
    assert sorted(rows()) == NAMES
