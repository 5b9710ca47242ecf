"""What every cold record shares."""

from __future__ import annotations

import math
import secrets
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


class Record(BaseModel):
    """Immutable; an unknown field is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""What people name things: letters, digits, dot, dash, underscore; 128 at most."""


def _bounded_json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse documents nested deeper than 32: they cost a recursion in every reader. And NaN and
    infinities: JSON has none, so they would come back as something else."""
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > 32:
            raise ValueError("nested deeper than 32")
        if isinstance(node, dict):
            stack.extend((child, depth + 1) for child in node.values())
        elif isinstance(node, list):
            stack.extend((child, depth + 1) for child in node)
        elif isinstance(node, float) and not math.isfinite(node):
            raise ValueError(f"{node} is no number in JSON")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded_json)]


def new_id(prefix: str) -> str:
    """An unguessable identifier such as ``run_3f9c…`` (80 bits)."""
    return f"{prefix}_{secrets.token_hex(10)}"
