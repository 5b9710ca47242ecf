"""Writing server-sent events. Shared by all dialects."""

from __future__ import annotations

from typing import Any

import msgspec


def event(document: dict[str, Any], name: str | None = None) -> bytes:
    """One event; ``name`` for the providers that name theirs."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(document) + b"\n\n"
