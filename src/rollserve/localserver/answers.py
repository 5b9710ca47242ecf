"""Progress of a sequence → the body of the answer, and the delivery of one to a live connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import Message, Receive, Scope, Send

from rollserve.errors import BackendError, RollserveError
from rollserve.localserver.request import (
    Choice,
    GenerateAnswer,
    Logprobs,
    PromptLogprob,
    TokenLogprob,
    Usage,
)
from rollserve.localserver.sequence import Progress, Sequence

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def answer(progress: Progress, *, model: str, created: int) -> GenerateAnswer:
    """Raises ``BackendError`` for a sequence that the engine gave up."""
    sequence = progress.sequence
    if sequence.failure is not None:
        raise BackendError(sequence.failure, operation="generate")
    done = progress.finish_reason is not None
    first = progress.start == 0 or not sequence.streamed
    sampled = progress.start + len(progress.token_ids)
    prompt = len(sequence.prompt_ids)
    return GenerateAnswer(
        request_id=sequence.request_id,
        model=model,
        created=created,
        choices=[_choice(progress)],
        prompt_token_ids=sequence.prompt_ids if first else None,
        usage=Usage(prompt, sampled, prompt + sampled) if done else None,
        prompt_logprobs=_prompt_logprobs(sequence) if first else None,
    )


def _prompt_logprobs(sequence: Sequence) -> list[dict[str, PromptLogprob] | None] | None:
    if sequence.prompt_logprobs is None:
        return None
    rest = zip(sequence.prompt_ids[1:], sequence.prompt_logprobs, strict=True)
    return [None, *({str(token_id): PromptLogprob(logprob)} for token_id, logprob in rest)]


def _choice(progress: Progress) -> Choice:
    logprobs = None
    if progress.sequence.params.logprobs is not None:
        rows = zip(progress.token_ids, progress.logprobs, progress.ranks, strict=True)
        logprobs = Logprobs([TokenLogprob(token_id, logprob, rank) for token_id, logprob, rank in rows])
    return Choice(
        index=0,
        finish_reason=progress.finish_reason,
        stop_reason=progress.stop_reason,
        token_ids=progress.token_ids,
        logprobs=logprobs,
        weight_versions=progress.spans,
    )


def problem(error: RollserveError) -> dict[str, object]:
    """vLLM's (OpenAI's) error body; ``param`` is the field at fault."""
    body = {"message": str(error), "type": type(error).__name__, "param": error.field, "code": error.status}
    return {"error": body}


async def until_disconnect(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


async def or_disconnect(result: Awaitable[Progress], gone: asyncio.Task[None]) -> Progress | None:
    """What comes first: the result, or ``None`` when the client has gone."""
    waited = asyncio.ensure_future(result)
    try:
        await asyncio.wait({waited, gone}, return_when=asyncio.FIRST_COMPLETED)
        return waited.result() if waited.done() else None
    finally:
        waited.cancel()


class EventStream:
    """An answer as server-sent events, ended by ``data: [DONE]``. A client that goes away, at any
    moment, calls ``abort``."""

    def __init__(
        self,
        sequence: Sequence,
        progress: asyncio.Queue[Progress],
        encode: Callable[[Progress], GenerateAnswer],
        abort: Callable[[Sequence], None],
    ) -> None:
        self._sequence = sequence
        self._progress = progress
        self._encode = encode
        self._abort = abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(until_disconnect(receive))
        finished = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            while not finished:
                progress = await or_disconnect(self._progress.get(), gone)
                if progress is None:
                    return
                finished = progress.finish_reason is not None
                await _send_data(send, self._event(progress))
            await _send_data(send, b"[DONE]")
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            if not finished:
                self._abort(self._sequence)

    def _event(self, progress: Progress) -> bytes:
        try:
            return msgspec.json.encode(self._encode(progress))
        except RollserveError as error:
            return msgspec.json.encode(problem(error))


async def _send_data(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
