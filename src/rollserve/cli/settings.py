"""Command-line flags to overrides of the settings tree."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from rollserve.errors import ConfigError


def _place(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


def _parse(text: str) -> Any:
    """A value as TOML has it; what is no TOML value is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def flags(named: Mapping[str, Any], assignments: Sequence[str], *, flag: str = "--set") -> dict[str, Any]:
    """``named`` by dotted setting, None left out; then the ``a.b=value`` of a repeatable
    ``flag``. Raises ``ConfigError``."""
    tree: dict[str, Any] = {}
    for dotted, value in named.items():
        if value is not None:
            _place(tree, dotted, value)
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        if not equals or not dotted:
            raise ConfigError(f"{flag} wants NAME=VALUE, got {assignment!r}")
        _place(tree, dotted.strip(), _parse(text.strip()))
    return tree
