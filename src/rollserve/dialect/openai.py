"""What OpenAI's two forms have in common: errors, models, token logprobs, what clients say of themselves,
and the words for an answer's schema and for a choice of tools. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollserve.dialect.base import TokenLogprob
from rollserve.dialect.reading import storable
from rollserve.errors import ContextTooLong, InvalidInput, RollserveError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MOST_HINT_CHARS = 256
_CHOICES = ("function", "custom", "allowed_tools")


def error_document(error: RollserveError, status: int) -> dict[str, Any]:
    """What stands under ``error``."""
    return {
        "message": error_message(error),
        "type": _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": error.field,
        "code": "context_length_exceeded" if isinstance(error, ContextTooLong) else error.code,
    }


def error_message(error: RollserveError) -> str:
    """A context that is too long is said in the words by which clients know that they must compact."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    if isinstance(error, ContextTooLong):
        return (
            "Your input exceeds the context window of this model. "
            f"This model's maximum context length is exceeded: {message}"
        )
    return message


class OpenAIDialect:
    """What chat and responses share of a ``Dialect``."""

    def models(self, names: Sequence[str], *, created_s: int) -> bytes:
        entries = [_model(name, created_s) for name in names]
        return msgspec.json.encode({"object": "list", "data": entries})

    def model(self, name: str, *, created_s: int) -> bytes:
        """One model, where the path named it (``Target.model``)."""
        return msgspec.json.encode(_model(name, created_s))

    def error(self, error: RollserveError, status: int) -> bytes:
        return msgspec.json.encode({"error": error_document(error, status)})


def _model(name: str, created_s: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "rollserve"}


def logprob_entries(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Of the sampled tokens alone: no others are known."""
    return [
        {"token": each.token, "logprob": each.logprob, "bytes": list(each.token.encode()), "top_logprobs": []}
        for each in tokens
    ]


def hints(headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, str]:
    """Who is asking, as far as the client says: see ``ChatRequest.hints``. Codex says the same in headers
    and in ``client_metadata``."""
    metadata = body.get("client_metadata")
    said: dict[str, Any] = {**(metadata if isinstance(metadata, dict) else {}), **headers}
    found = {
        "session": _first(
            said.get("session-id"),
            said.get("x-session-id"),
            said.get("x-litellm-session-id"),
            body.get("session_id"),
        ),
        "subagent": _subagent(said),
        "purpose": _purpose(said),
        "retry": _retry(said.get("x-stainless-retry-count")),
    }
    return {name: value for name, value in found.items() if value}


def _first(*values: Any) -> str:
    return next((v for v in values if isinstance(v, str) and 0 < len(v) <= _MOST_HINT_CHARS), "")


def _subagent(said: Mapping[str, Any]) -> str:
    """Its own thread or session where it has one: several of a kind run at the same time."""
    kind, above = said.get("x-openai-subagent"), said.get("x-codex-parent-thread-id")
    if kind or above:
        return _first(said.get("thread-id"), kind, above)
    if parent := said.get("x-parent-session-id"):
        return _first(said.get("x-session-id"), parent)
    return ""


def _purpose(said: Mapping[str, Any]) -> str:
    kind = _turn_metadata(said.get("x-codex-turn-metadata")).get("request_kind")
    if said.get("x-openai-subagent") == "compact":
        return "compaction"
    return "" if kind == "turn" else _first(kind)


def _turn_metadata(given: Any) -> dict[str, Any]:
    if not isinstance(given, str):
        return {}
    try:
        read = msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {}
    return read if isinstance(read, dict) else {}


def _retry(count: Any) -> str:
    """Clients that don't count say 0."""
    return _first(count) if isinstance(count, str) and count.isdecimal() and int(count[:4]) else ""


def schema_of(given: Mapping[str, Any], inner: Mapping[str, Any], at: str) -> dict[str, Any] | None:
    """The JSON schema a format asks for; None for free text. ``inner`` is where its schema stands."""
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    if kind != "json_schema":
        raise InvalidInput(f"a format of type {kind!r} is not supported", field=f"{at}.type")
    schema = inner.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise InvalidInput("a schema must be an object", field=f"{at}.schema")
    storable(schema, f"{at}.schema")
    return schema or {}


def offers_tools(choice: Any) -> bool:
    """False when the request says that no tool may be called: then none is offered. ``required`` and a
    named tool are advice: a forced call would not be the policy's own choice, so nothing is enforced."""
    if choice is None or choice in ("auto", "required"):
        return True
    if choice == "none":
        return False
    if isinstance(choice, dict) and choice.get("type") in _CHOICES:
        return True
    raise InvalidInput("this choice is not supported", field="tool_choice")


def kept(raw: Mapping[str, Any], read: frozenset[str]) -> dict[str, Any]:
    """What is recorded as asked for: all that is not ``read``, the unknown too."""
    asked = {name: value for name, value in raw.items() if name not in read and value is not None}
    for name, value in asked.items():
        storable(value, name)
    return asked


def at_least_one(value: int | None, name: str) -> None:
    if value is not None and not 1 <= value < 2**63:
        raise InvalidInput("must be at least 1", field=name)
