"""Opaque strings that lead back to a call: what clients send back unchanged, we mint from the call's id.

A mark is base64, since some providers' clients hold it as bytes. It is no secret and no proof: who sends
one back says which call a turn is from, and the gateway compares it with what that call said. What is not
ours is nobody's.
"""

from __future__ import annotations

import base64
import binascii

_OURS = b"rollserve:"
_MOST_CHARS = 512
_STANDARD = str.maketrans("-_", "+/")


def mark(call_id: str) -> str:
    return base64.b64encode(_OURS + call_id.encode()).decode()


def marked(value: str | None) -> str | None:
    """The call that a mark of ours names; None for anything else. Clients that hold it as bytes may send
    it in base64's other alphabet, or without padding."""
    if not value or len(value) > _MOST_CHARS:
        return None
    try:
        padded = value.translate(_STANDARD) + "=" * (-len(value) % 4)
        plain = base64.b64decode(padded, validate=True)
        return plain[len(_OURS) :].decode() or None if plain.startswith(_OURS) else None
    except (binascii.Error, ValueError):
        return None
