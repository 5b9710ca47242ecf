"""Tool input that is no JSON object, where the provider's form only holds objects.

It travels as ``{"__unparsedToolInput": {"raw": TEXT}}``, the form in which Claude Code itself returns what
it could not read. It fits no tool's schema, so that the agent answers such a call with an error; and it is
known again when it comes back.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollserve.records.base import deeper_than

_UNPARSED = "__unparsedToolInput"


def as_object(arguments: str) -> dict[str, Any]:
    """A tool call's arguments as the object a provider's form wants."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        value = None
    if not isinstance(value, dict) or _UNPARSED in value or deeper_than(value):
        return {_UNPARSED: {"raw": arguments}}
    return value


def as_arguments(given: dict[str, Any]) -> str:
    """The arguments' text that a returned object stands for."""
    broken = given.get(_UNPARSED)
    if isinstance(broken, dict) and isinstance(broken.get("raw"), str):
        raw: str = broken["raw"]
        return raw
    return msgspec.json.encode(given).decode()
