"""Answers of Google's generateContent: whole, streamed, and as errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollserve.dialect.base import Answered, Piece, TokenLogprob
from rollserve.dialect.generate_content_request import GoogleForm
from rollserve.dialect.marks import mark
from rollserve.dialect.tool_input import as_object
from rollserve.dialect.writing import event
from rollserve.errors import ContextTooLong, RollserveError
from rollserve.records.call import ToolCall

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def response(answers: Sequence[Answered], model: str, *, thoughts: bool) -> dict[str, Any]:
    """A whole answer; a candidate each choice."""
    candidates = []
    for index, answer in enumerate(answers):
        said = answer.message
        told = (Piece("reasoning", said.reasoning or ""), Piece("content", said.content))
        parts = [part for piece in told for part in _text(piece, thoughts)] + _calls(answer)
        candidates.append(_candidate(index, _signed(parts, answer.call_id), answer))
    return {**_head(answers[0].call_id, model), "candidates": candidates, "usageMetadata": _usage(answers)}


def _head(response_id: str, model: str) -> dict[str, Any]:
    return {"responseId": response_id, "modelVersion": model}


def _candidate(index: int, parts: list[dict[str, Any]], answer: Answered | None = None) -> dict[str, Any]:
    """Without ``answer``, one that goes on."""
    candidate = {"index": index, "content": {"role": "model", "parts": parts}}
    if answer is None:
        return candidate
    cut = answer.finish_reason in ("length", "abort")
    candidate["finishReason"] = "MAX_TOKENS" if cut else "STOP"
    return {**candidate, **_logprobs(answer.tokens)}


def _text(piece: Piece, thoughts: bool) -> list[dict[str, Any]]:
    """As parts: none where there is nothing to say, or thoughts are not wanted."""
    if not piece.text or (piece.kind == "reasoning" and not thoughts):
        return []
    return [{"text": piece.text, "thought": True} if piece.kind == "reasoning" else {"text": piece.text}]


def _calls(answer: Answered) -> list[dict[str, Any]]:
    return [{"functionCall": _call(call)} for call in answer.message.tool_calls]


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "args": as_object(call.arguments)}


def _signed(parts: list[dict[str, Any]], call_id: str) -> list[dict[str, Any]]:
    """With the signature where clients keep it: on the first call, else on the last part."""
    parts = parts or [{"text": ""}]
    place = next((part for part in parts if "functionCall" in part), parts[-1])
    place["thoughtSignature"] = mark(call_id)
    return parts


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any]:
    if tokens is None:
        return {}
    chosen = [{"token": each.token, "logProbability": each.logprob} for each in tokens]
    mean = sum(each.logprob for each in tokens) / max(1, len(tokens))
    return {"avgLogprobs": mean, "logprobsResult": {"chosenCandidates": chosen, "topCandidates": []}}


def _usage(answers: Sequence[Answered]) -> dict[str, int]:
    """All answers have one prompt; thoughts are counted with the text."""
    prompt, sampled = answers[0].prompt_tokens, sum(answer.sampled_tokens for answer in answers)
    counts = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled,
        "totalTokenCount": prompt + sampled,
    }
    cached = answers[0].cached_tokens
    return {**counts, "cachedContentTokenCount": cached} if cached else counts


class ChunkWriter:
    """The chunks of one streamed answer, as events or as elements of one JSON array (``form.array``).
    Keep-alives are chunks with an empty text: comment lines break clients of Google's."""

    def __init__(self, *, stream_id: str, model: str, form: GoogleForm) -> None:
        self._head = _head(stream_id, model)
        self._form = form
        self._begun = False
        self.media_type = "application/json" if form.array else "text/event-stream"

    def opening(self) -> bytes:
        return b"[" if self._form.array else b""

    def piece(self, piece: Piece, *, choice: int = 0) -> bytes:
        parts = _text(piece, self._form.thoughts)
        return self._chunk({"candidates": [_candidate(choice, parts)]}) if parts else b""

    def keep_alive(self) -> bytes:
        return self._chunk({"candidates": [_candidate(0, [{"text": ""}])]})

    def closing(self, answers: Sequence[Answered], rest: Sequence[Sequence[Piece]]) -> bytes:
        candidates = []
        for index, (answer, missing) in enumerate(zip(answers, rest, strict=True)):
            parts = [part for piece in missing for part in _text(piece, self._form.thoughts)]
            last = _calls(answer) or [{"text": ""}]
            candidates.append(_candidate(index, _signed([*parts, *last], answer.call_id), answer))
        return self._chunk({"candidates": candidates, "usageMetadata": _usage(answers)}) + self._end()

    def failure(self, error: RollserveError, status: int) -> bytes:
        return self._document(error_body(error, status)) + self._end()

    def _chunk(self, fields: dict[str, Any]) -> bytes:
        return self._document({**fields, **self._head})

    def _document(self, document: dict[str, Any]) -> bytes:
        if not self._form.array:
            return event(document)
        between, self._begun = b",\n" if self._begun else b"", True
        return between + msgspec.json.encode(document)

    def _end(self) -> bytes:
        return b"]" if self._form.array else b""


def error_body(error: RollserveError, status: int) -> dict[str, Any]:
    """An error in Google's form."""
    text = str(error)
    if isinstance(error, ContextTooLong) and None not in (error.prompt_tokens, error.context_tokens):
        text = (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed "
            f"({error.context_tokens})."
        )
    name = _STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
    return {"error": {"code": status, "message": text, "status": name}}
