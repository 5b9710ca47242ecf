"""OpenAI chat completions, to and from our records. Pure.

What can't be honoured is refused with the parameter's name. Sampling parameters are never honoured
(the run's settings win): they are kept in ``asked``, as is what is unknown. ``developer`` is
``system``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollserve.dialect import chat_answer, chat_request
from rollserve.dialect.base import Answered, Asked, StreamWriter, Target
from rollserve.dialect.openai import OpenAIDialect
from rollserve.errors import MethodNotAllowed, NotFound

_PATH = "/v1/chat/completions"
_MODELS = "/v1/models"


class ChatDialect(OpenAIDialect):
    """``Dialect`` of ``POST /v1/chat/completions``, and of ``GET /v1/models[/NAME]``."""

    name = "chat"

    def target(self, method: str, path: str) -> Target | None:
        if path == _PATH:
            found, wanted = Target(operation="generate"), "POST"
        elif path == _MODELS or path.startswith(f"{_MODELS}/"):
            found, wanted = Target(operation="models", model=path[len(_MODELS) + 1 :]), "GET"
        else:
            return None
        if method != wanted:
            raise MethodNotAllowed(f"use {wanted}")
        return found

    def parse(
        self, target: Target, body: bytes, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> Asked:
        return chat_request.read(body, headers)

    def whole(self, asked: Asked, answers: Sequence[Answered], *, created_s: int) -> bytes:
        return chat_answer.completion(answers, model=asked.model, created_s=created_s)

    def writer(self, asked: Asked, *, stream_id: str, created_s: int) -> StreamWriter:
        return chat_answer.ChunkWriter(
            stream_id=stream_id,
            created_s=created_s,
            model=asked.model,
            choices=asked.n,
            include_usage=asked.form.include_usage,
        )

    def counted(self, asked: Asked, prompt_tokens: int) -> bytes:
        raise NotFound("chat completions have no route that counts")
