"""Reading a body: JSON to typed structs, with errors that name the field. Shared by all dialects."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from rollserve.errors import InvalidInput
from rollserve.records.base import MAX_DEPTH, deeper_than

T = TypeVar("T")


def decode(body: bytes) -> dict[str, Any]:
    """Raises ``InvalidInput`` (field ``body``) for what is no JSON object."""
    try:
        raw = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidInput("the JSON is nested too deeply", field="body") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body is not valid JSON: {error}", field="body") from error
    if not isinstance(raw, dict):
        raise InvalidInput("the body must be a JSON object", field="body")
    return raw


def convert(raw: Any, kind: type[T], *, at: str = "") -> T:
    """``raw`` as ``kind``. Raises ``InvalidInput`` with the dotted path of the field, after ``at``."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        inner = path.rstrip("`").replace("[", ".").replace("]", "").strip(".")
        parts = [part for part in (at, inner) if part]
        if "missing required field" in reason:
            parts.append(reason.split("`")[1])
        raise InvalidInput(reason, field=".".join(parts) or "body") from error


def storable(document: Any, at: str) -> None:
    """Raises ``InvalidInput`` for what JSON may say and no record can hold: numbers beyond 64 bits, and
    more than ``MAX_DEPTH`` levels."""
    try:
        msgspec.msgpack.encode(document)
    except OverflowError as error:
        raise InvalidInput("numbers beyond 64 bits are not supported", field=at) from error
    except RecursionError as error:
        raise InvalidInput(f"nested deeper than {MAX_DEPTH}", field=at) from error
    if deeper_than(document):
        raise InvalidInput(f"nested deeper than {MAX_DEPTH}", field=at)
