"""What every cold record shares."""

from __future__ import annotations

import math
import secrets
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_DEPTH = 64
"""Documents nested deeper cost a recursion in every reader."""

MAX_KEPT_DEPTH = 32
"""The same for what a record keeps unread, which stands inside others."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


class Record(BaseModel):
    """Immutable; an unknown field is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""What people name things: letters, digits, dot, dash, underscore; 128 at most."""


def deeper_than(document: object, limit: int = MAX_DEPTH) -> bool:
    """Whether a JSON document has more than ``limit`` levels of lists and objects, leaves counted as one."""
    level = [document]
    for _ in range(limit):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


def _bounded_json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse documents of more than ``MAX_KEPT_DEPTH`` levels. And NaN and infinities: JSON has none, so they
    would come back as something else."""
    if deeper_than(value, MAX_KEPT_DEPTH):
        raise ValueError(f"nested deeper than {MAX_KEPT_DEPTH}")
    stack: list[Any] = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, float) and not math.isfinite(node):
            raise ValueError(f"{node} is no number in JSON")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded_json)]


def new_id(prefix: str) -> str:
    """An unguessable identifier such as ``run_3f9c…`` (80 bits)."""
    return f"{prefix}_{secrets.token_hex(10)}"
