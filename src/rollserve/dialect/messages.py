"""Anthropic Messages, to and from our records. Pure. The rules are told by the two halves:
``messages_request`` and ``messages_answer``.

``GET /v1/models`` is OpenAI's path, too: a client of Anthropic's says so by a header (``speaks``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from rollserve.dialect.base import Answered, Asked, Target
from rollserve.dialect.messages_answer import EventWriter, error_body, message
from rollserve.dialect.messages_request import read
from rollserve.errors import MethodNotAllowed, RollserveError

_POSTED = {
    "/v1/messages": Target(operation="generate"),
    "/v1/messages/count_tokens": Target(operation="count"),
}
_MODELS = "/v1/models"


class MessagesDialect:
    """A ``Dialect``."""

    name = "messages"

    @staticmethod
    def speaks(headers: Mapping[str, str]) -> bool:
        """Whether a request comes from a client of Anthropic's; ``headers`` have lower-case names."""
        return "anthropic-version" in headers

    def target(self, method: str, path: str) -> Target | None:
        found, wanted = _POSTED.get(path), "POST"
        if path == _MODELS or path.startswith(f"{_MODELS}/"):
            found, wanted = Target(operation="models", model=path[len(_MODELS) + 1 :]), "GET"
        if found is not None and method != wanted:
            raise MethodNotAllowed(f"use {wanted}")
        return found

    def parse(
        self, target: Target, body: bytes, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> Asked:
        return read(body, headers, counting=target.operation == "count")

    def whole(self, asked: Asked, answers: Sequence[Answered], *, created_s: int) -> bytes:
        return msgspec.json.encode(message(answers[0], asked.model))

    def writer(self, asked: Asked, *, stream_id: str, created_s: int) -> EventWriter:
        return EventWriter(stream_id=stream_id, model=asked.model)

    def counted(self, asked: Asked, prompt_tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": prompt_tokens})

    def models(self, names: Sequence[str], *, created_s: int) -> bytes:
        data = [_model(name, created_s) for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return msgspec.json.encode({"data": data, "has_more": False, **ends})

    def model(self, name: str, *, created_s: int) -> bytes:
        """One model, where the path named it (``Target.model``)."""
        return msgspec.json.encode(_model(name, created_s))

    def error(self, error: RollserveError, status: int) -> bytes:
        return msgspec.json.encode(error_body(error, status))


def _model(name: str, created_s: int) -> dict[str, Any]:
    created_at = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created_at,
        "lifecycle": "active",
    }
