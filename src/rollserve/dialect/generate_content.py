"""Google's generateContent, to and from our records. Pure. The rules are told by the two halves:
``generate_content_request`` and ``generate_content_answer``.

Paths are read with any version in front, or none: litellm leaves it out. ``GET /v1/models`` is OpenAI's
path, too: a client of Google's says so by a header (``speaks``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollserve.dialect.base import Answered, Asked, Operation, Target
from rollserve.dialect.generate_content_answer import ChunkWriter, error_body, response
from rollserve.dialect.generate_content_request import read
from rollserve.errors import MethodNotAllowed, RollserveError

_PATH = re.compile(
    r"(?:/v1(?:alpha|beta)?)?/models"
    r"(?:/(?P<model>.+?)(?::(?P<verb>generateContent|streamGenerateContent|countTokens))?)?"
)
_VERBS: dict[str, tuple[Operation, bool]] = {
    "generateContent": ("generate", False),
    "streamGenerateContent": ("generate", True),
    "countTokens": ("count", False),
}


class GenerateContentDialect:
    """A ``Dialect``."""

    name = "generate_content"

    @staticmethod
    def speaks(headers: Mapping[str, str]) -> bool:
        """Whether a request comes from a client of Google's; ``headers`` have lower-case names."""
        return "x-goog-api-key" in headers or "x-goog-api-client" in headers

    def target(self, method: str, path: str) -> Target | None:
        found = _PATH.fullmatch(path)
        if found is None:
            return None
        model, verb = found["model"] or "", found["verb"]
        if verb is None and ":" in model and method == "POST":
            return None
        wanted = "GET" if verb is None else "POST"
        if method != wanted:
            raise MethodNotAllowed(f"use {wanted}")
        if verb is None:
            return Target(operation="models", model=model)
        operation, stream = _VERBS[verb]
        return Target(operation=operation, model=model, stream=stream)

    def parse(
        self, target: Target, body: bytes, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> Asked:
        return read(target, body, headers, query)

    def whole(self, asked: Asked, answers: Sequence[Answered], *, created_s: int) -> bytes:
        return msgspec.json.encode(response(answers, asked.model, thoughts=asked.form.thoughts))

    def writer(self, asked: Asked, *, stream_id: str, created_s: int) -> ChunkWriter:
        return ChunkWriter(stream_id=stream_id, model=asked.model, form=asked.form)

    def counted(self, asked: Asked, prompt_tokens: int) -> bytes:
        return msgspec.json.encode({"totalTokens": prompt_tokens})

    def models(self, names: Sequence[str], *, created_s: int) -> bytes:
        return msgspec.json.encode({"models": [_model(name) for name in names]})

    def model(self, name: str, *, created_s: int) -> bytes:
        """One model, where the path named it (``Target.model``)."""
        return msgspec.json.encode(_model(name))

    def error(self, error: RollserveError, status: int) -> bytes:
        return msgspec.json.encode(error_body(error, status))


def _model(name: str) -> dict[str, Any]:
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
