"""Answers of Anthropic Messages: whole, streamed, and as errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollserve.dialect.base import Answered, Piece
from rollserve.dialect.marks import mark
from rollserve.dialect.tool_input import as_object
from rollserve.dialect.writing import event
from rollserve.errors import ContextTooLong, RollserveError
from rollserve.records.call import ToolCall

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "abort": "max_tokens"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def message(answer: Answered, model: str) -> dict[str, Any]:
    """An answer as a ``message``."""
    return {
        **_head(answer.call_id, model),
        "content": _content(answer),
        **_ending(answer),
        "usage": _usage(answer),
    }


def _head(message_id: str, model: str) -> dict[str, Any]:
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def _content(answer: Answered) -> list[dict[str, Any]]:
    said = answer.message
    blocks: list[dict[str, Any]] = []
    if said.reasoning:
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": mark(answer.call_id)})
    if said.content or not (blocks or said.tool_calls):
        blocks.append({"type": "text", "text": said.content})
    return blocks + [_tool_use(call, as_object(call.arguments)) for call in said.tool_calls]


def _tool_use(call: ToolCall, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _ending(answer: Answered) -> dict[str, Any]:
    reason = _STOP_REASONS.get(answer.finish_reason, "end_turn")
    if answer.stopped_by is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by}


def _usage(answer: Answered) -> dict[str, int]:
    """Anthropic's ``input_tokens`` are those not read from a cache; clients add the two up."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.sampled_tokens,
    }


class EventWriter:
    """The events of one answer. A thinking block is signed when it ends, which is before the answer is
    known: with ``stream_id``, that therefore has to be the id of the call."""

    media_type = "text/event-stream"

    def __init__(self, *, stream_id: str, model: str) -> None:
        self._id = stream_id
        self._model = model
        self._blocks = 0
        self._open: str | None = None

    def opening(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        ending = {"stop_reason": None, "stop_sequence": None}
        head = {**_head(self._id, self._model), "content": [], **ending, "usage": usage}
        return _event({"type": "message_start", "message": head})

    def piece(self, piece: Piece, *, choice: int = 0) -> bytes:
        if not piece.text:
            return b""
        kind = "thinking" if piece.kind == "reasoning" else "text"
        opened = b"" if self._open == kind else self._text_block(kind)
        return opened + self._delta({"type": f"{kind}_delta", kind: piece.text})

    def keep_alive(self) -> bytes:
        return _event({"type": "ping"})

    def closing(self, answers: Sequence[Answered], rest: Sequence[Sequence[Piece]]) -> bytes:
        answer = answers[0]
        parts = [self.piece(piece) for piece in rest[0]]
        if not self._blocks and not answer.message.tool_calls:
            parts.append(self._text_block("text"))
        parts.append(self._close())
        parts += [self._tool_call(call) for call in answer.message.tool_calls]
        parts.append(_event({"type": "message_delta", "delta": _ending(answer), "usage": _usage(answer)}))
        parts.append(_event({"type": "message_stop"}))
        return b"".join(parts)

    def failure(self, error: RollserveError, status: int) -> bytes:
        return _event(error_body(error, status))

    def _text_block(self, kind: str) -> bytes:
        signed = {"signature": ""} if kind == "thinking" else {}
        closed = self._close()
        self._open = kind
        return closed + self._start({"type": kind, kind: "", **signed})

    def _start(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    def _stop(self) -> bytes:
        return _event({"type": "content_block_stop", "index": self._blocks - 1})

    def _close(self) -> bytes:
        """The end of the open text or thinking block; nothing when none is open."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signature = {"type": "signature_delta", "signature": mark(self._id)}
        return (self._delta(signature) if kind == "thinking" else b"") + self._stop()

    def _tool_call(self, call: ToolCall) -> bytes:
        text = msgspec.json.encode(as_object(call.arguments)).decode()
        started = self._start(_tool_use(call, {}))
        return started + self._delta({"type": "input_json_delta", "partial_json": text}) + self._stop()


def _event(document: dict[str, Any]) -> bytes:
    return event(document, document["type"])


def error_body(error: RollserveError, status: int) -> dict[str, Any]:
    """An error in Anthropic's form. Claude Code compacts its history when it reads of a prompt that is
    too long in just these words."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    text = str(error)
    if isinstance(error, ContextTooLong):
        known = error.prompt_tokens is not None and error.context_tokens is not None
        numbers = f"{error.prompt_tokens} tokens > {error.context_tokens} maximum"
        text = f"prompt is too long: {numbers if known else error.message}"
    return {"type": "error", "error": {"type": kind, "message": text}}
