"""Ids of responses and their items: made of the call's id, which they lead back to. Pure.

Clients send items back with the ids they were given, or without any. An id that is not of this form says
nothing.
"""

from __future__ import annotations

_OURS = "_rv_"
_RESPONSE = "resp_"
RAW_INPUT = "ctr"
"""Begins the id of a custom tool's call whose input is the arguments' text as the model wrote it."""


def response_id(call_id: str) -> str:
    return _RESPONSE + call_id


def call_of_response(given: str) -> str:
    return given.removeprefix(_RESPONSE)


def item_id(kind: str, call_id: str, index: int) -> str:
    """``kind`` is what the provider's ids begin with (``msg``, ``rs``, ``fc``, ``ctc``)."""
    return f"{kind}{_OURS}{call_id}_{index}"


def call_of_item(given: str | None) -> str | None:
    _, ours, rest = (given or "").partition(_OURS)
    call_id, _, index = rest.rpartition("_")
    return call_id if ours and call_id and index.isdecimal() else None


def holds_raw_input(given: str | None) -> bool:
    return (given or "").startswith(RAW_INPUT + _OURS)
