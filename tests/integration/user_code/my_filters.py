"""Filters that tests run in a code host."""

from __future__ import annotations

from typing import Any


def even(rewards: list[float], task: dict[str, Any], options: dict[str, Any]) -> bool:
    number: int = task["metadata"]["number"]
    return number % 2 == options["rest"] and max(rewards) == 1.0
