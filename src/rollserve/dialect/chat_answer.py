"""Answers, streams and errors in the form of chat completions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollserve.dialect.base import Answered, Piece, TokenLogprob
from rollserve.dialect.openai import error_document, logprob_entries
from rollserve.dialect.writing import event
from rollserve.errors import RollserveError
from rollserve.records.call import Message

_DONE = b"data: [DONE]\n\n"


def completion(answers: Sequence[Answered], *, model: str, created_s: int) -> bytes:
    """The answer to a request without ``stream``; named after the call of its first choice."""
    return msgspec.json.encode(
        {
            "id": completion_id(answers[0].call_id),
            "object": "chat.completion",
            "created": created_s,
            "model": model,
            "choices": [_choice(index, answer) for index, answer in enumerate(answers)],
            "usage": _usage(answers),
        }
    )


def completion_id(call_id: str) -> str:
    return f"chatcmpl-{call_id}"


def _choice(index: int, answer: Answered) -> dict[str, Any]:
    message = answer.message
    reply: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        reply["content"] = message.content or None
        reply["tool_calls"] = _tool_calls(message)
    if message.reasoning:
        reply["reasoning_content"] = message.reasoning
    return {
        "index": index,
        "message": reply,
        "finish_reason": _finish(answer.finish_reason),
        "logprobs": _logprobs(answer.tokens),
    }


def _finish(ours: str) -> str:
    """An aborted answer is one that was cut."""
    return "length" if ours == "abort" else ours


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    return None if tokens is None else {"content": logprob_entries(tokens)}


def _usage(answers: Sequence[Answered]) -> dict[str, Any]:
    """The prompt of several choices is one."""
    prompt, sampled = answers[0].prompt_tokens, sum(answer.sampled_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }


class ChunkWriter:
    """``StreamWriter`` of chat completion chunks."""

    def __init__(
        self, *, stream_id: str, created_s: int, model: str, choices: int, include_usage: bool
    ) -> None:
        self._head: dict[str, Any] = {
            "id": completion_id(stream_id),
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
        }
        self._choices = choices
        self._include_usage = include_usage

    def opening(self) -> bytes:
        """Who speaks: once for each choice, since clients add up what deltas say."""
        return b"".join(
            self._delta(index, {"role": "assistant", "content": ""}) for index in range(self._choices)
        )

    def piece(self, piece: Piece, *, choice: int = 0) -> bytes:
        return self._delta(
            choice, {"content" if piece.kind == "content" else "reasoning_content": piece.text}
        )

    def keep_alive(self) -> bytes:
        """A delta that adds nothing: comment lines don't reset every client's timer."""
        return self._delta(0, {"content": ""})

    def closing(self, answers: Sequence[Answered], rest: Sequence[Sequence[Piece]]) -> bytes:
        parts = [
            self._end(index, answer, pieces)
            for index, (answer, pieces) in enumerate(zip(answers, rest, strict=True))
        ]
        if self._include_usage:
            parts.append(event({**self._head, "choices": [], "usage": _usage(answers)}))
        return b"".join([*parts, _DONE])

    def _end(self, index: int, answer: Answered, rest: Sequence[Piece]) -> bytes:
        parts = [self.piece(piece, choice=index) for piece in rest]
        if calls := _tool_calls(answer.message):
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            parts.append(self._delta(index, {"tool_calls": numbered}))
        parts.append(self._delta(index, {}, _finish(answer.finish_reason), _logprobs(answer.tokens)))
        return b"".join(parts)

    def failure(self, error: RollserveError, status: int) -> bytes:
        return event({"error": error_document(error, status)})

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return event({**self._head, "choices": [choice], **usage})
