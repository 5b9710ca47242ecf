"""OpenAI Responses, to and from our records. Pure.

Without ``store``: an answer is asked for by its id only through ``previous_response_id``. A WebSocket
(``GET`` with ``Upgrade``) is none of this dialect's; 426 makes Codex fall back to ``POST``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rollserve.dialect import responses_answer, responses_request
from rollserve.dialect.base import Answered, Asked, StreamWriter, Target
from rollserve.dialect.openai import OpenAIDialect
from rollserve.dialect.responses_stream import EventWriter
from rollserve.errors import MethodNotAllowed

_PATHS = {
    "/v1/responses": Target(operation="generate"),
    "/v1/responses/input_tokens": Target(operation="count"),
}


class ResponsesDialect(OpenAIDialect):
    """``Dialect`` of ``POST /v1/responses`` and ``POST /v1/responses/input_tokens``."""

    name = "responses"

    def target(self, method: str, path: str) -> Target | None:
        found = _PATHS.get(path)
        if found is not None and method != "POST":
            raise MethodNotAllowed("use POST")
        return found

    def parse(
        self, target: Target, body: bytes, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> Asked:
        return responses_request.read(body, headers)

    def whole(self, asked: Asked, answers: Sequence[Answered], *, created_s: int) -> bytes:
        answer = answers[0]
        return msgspec.json.encode(
            responses_answer.response(
                asked.form,
                call_id=answer.call_id,
                model=asked.model,
                created_s=created_s,
                status=responses_answer.status(answer),
                output=responses_answer.output(answer, asked.form),
                usage=responses_answer.usage(answer),
            )
        )

    def writer(self, asked: Asked, *, stream_id: str, created_s: int) -> StreamWriter:
        return EventWriter(stream_id=stream_id, created_s=created_s, model=asked.model, form=asked.form)

    def counted(self, asked: Asked, prompt_tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": prompt_tokens})
