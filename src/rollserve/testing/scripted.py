"""A scripted policy: what it says is decided by a function of the prompt ids, so a test knows each token.

``ScriptedEngine`` is the model; ``ScriptedBackend`` gives it the backend contract in process, and
``rollserve.testing.scripted_server`` the routes of vLLM.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rollserve.backend.assembly import Assembly, Piece
from rollserve.backend.base import BackendHealth, GenerateRequest, Generation, TokenSink
from rollserve.backend.http import Answer
from rollserve.backend.refusals import refusal
from rollserve.errors import BackendUnavailable, CannotScore, ContextTooLong, InvalidInput
from rollserve.records.call import SamplingParams
from rollserve.records.policy import BackendInfo

OPERATION = "backend.generate"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the policy says: ids with the stop token at the end. ``latency_s``: the time of the whole of it,
    where it is not the engine's."""

    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"] = "stop"
    latency_s: float | None = None


FaultKind: TypeAlias = Literal["status", "drop", "hang"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``status``: that HTTP answer. ``drop``: the connection breaks off after ``after_tokens``.
    ``hang``: nothing more after that many, until it is aborted."""

    kind: FaultKind
    status: int = 500
    message: str = "scripted failure"
    retry_after_s: float | None = None
    content_type: str = "application/json"
    body: bytes | None = None
    after_tokens: int = 0


Script = Callable[[list[int]], Reply]
"""Prompt ids → what is said. Stateless scripts may be asked again for the same prompt."""


def random_reply(tokens: int = 16, *, vocabulary: int = 400, stop: int = 2) -> Script:
    """Pseudo-random ids from 3 up, decided by the prompt, with ``stop`` as the last."""

    def script(prompt_ids: list[int]) -> Reply:
        state = 1
        for token_id in prompt_ids:
            state = (state * 31 + token_id + 7) & 0x7FFFFFFF
        ids = []
        for _ in range(tokens - 1):
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            ids.append(3 + (state >> 8) % (vocabulary - 3))
        return Reply(token_ids=(*ids, stop))

    return script


def replies(*each: Reply) -> Script:
    """One after the other; the last for ever."""
    left = deque(each)

    def script(prompt_ids: list[int]) -> Reply:
        return left.popleft() if len(left) > 1 else left[0]

    return script


def by_turn(each: Sequence[Reply], header_ids: Sequence[int]) -> Script:
    """The reply of the turn that a prompt is at: the number of times ``header_ids`` (the opening of an
    assistant message) stands in it, less the one that asks for this reply. The last for ever."""
    header = tuple(header_ids)

    def script(prompt_ids: list[int]) -> Reply:
        return each[min(max(count(prompt_ids, header) - 1, 0), len(each) - 1)]

    return script


def count(ids: list[int], pattern: tuple[int, ...]) -> int:
    """How often the pattern stands in the ids."""
    found, at = 0, -1
    while True:
        try:
            at = ids.index(pattern[0], at + 1)
        except ValueError:
            return found
        found += tuple(ids[at : at + len(pattern)]) == pattern


def logprob_of(token_id: int, *, greedy: bool = False) -> float:
    """Of the token, wherever it stands: from -3 to just below 0; 0 where the choice was forced
    (``greedy``)."""
    if greedy:
        return 0.0
    return -(((token_id * 2654435761) >> 4) % 30000 + 1) / 10000.0


@dataclass(slots=True)
class Chunk:
    """Newly sampled tokens. The last chunk has a ``finish_reason``."""

    token_ids: list[int]
    logprobs: list[float]
    label: str | None
    finish_reason: Literal["stop", "length", "abort"] | None = None


class FaultHit(Exception):
    """A scripted fault that is the transport's to act out."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class ScriptedEngine:
    """``latency_s`` is the time of a whole reply (less when it is cut short), spread over its chunks of
    ``chunk_tokens`` (None: one chunk). ``label`` names the weights, None: it reports none; a change takes
    effect at the next chunk. ``faults`` befall the next requests, one each. While ``gate`` is cleared
    nothing is sampled. ``logprobs_mode`` is ``processed`` or ``raw``. Without ``counts_tokens`` its health
    tells nothing of the tokens it made. Where it ``scores``, a score is off by ``score_shift``, as if its
    weights were no longer those that sampled. ``pause`` and ``resume`` act as vLLM's: what runs ends first
    (*wait*), ends as it is (*abort*) or stands still (*keep*), and what comes meanwhile waits."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        model: str = "scripted",
        context_tokens: int = 32768,
        latency_s: float = 0.0,
        chunk_tokens: int | None = None,
        label: str | None = "0",
        logprobs_mode: Literal["processed", "raw"] = "processed",
    ) -> None:
        self.script = script or random_reply()
        self.adapters: dict[str, str] = {}
        self.model = model
        self.context_tokens = context_tokens
        self.latency_s = latency_s
        self.chunk_tokens = chunk_tokens
        self.label = label
        self.logprobs_mode = logprobs_mode
        self.faults: deque[Fault] = deque()
        self.gate = asyncio.Event()
        self.gate.set()
        self.unhealthy: str | None = None
        self.counts_tokens = True
        self.scores = True
        self.score_shift = 0.0
        self.running: dict[str, asyncio.Event] = {}
        self.paused: str | None = None
        self.resets = 0
        self._frozen = False
        self._changed = asyncio.Event()
        self.started = 0
        self.finished = 0
        self.aborted = 0
        self.generated_tokens = 0
        self.seen: deque[GenerateRequest] = deque(maxlen=1000)

    def check(self, model: str | None, prompt_ids: list[int]) -> None:
        """Raises ``InvalidInput`` for another model, ``ContextTooLong``."""
        if model is not None and model != self.model and model not in self.adapters:
            raise InvalidInput(f"the model {model!r} does not exist; served: {self.model!r}", field="model")
        if len(prompt_ids) >= self.context_tokens:
            raise ContextTooLong(
                f"the prompt has {len(prompt_ids)} tokens; the model's maximum context length is"
                f" {self.context_tokens}",
                field="token_ids",
            )

    def refuses_next(self) -> bool:
        """Whether the next request meets a status."""
        return bool(self.faults) and self.faults[0].kind == "status"

    def score(self, token_ids: list[int]) -> list[float]:
        """The logprob of each token but the first. Raises ``CannotScore``."""
        if not self.scores:
            raise CannotScore("this engine does not score", operation="backend.score")
        return [logprob_of(token_id) - self.score_shift for token_id in token_ids[1:]]

    async def run(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Raises ``FaultHit``. Leaving early counts as an abort."""
        self.check(request.model, list(request.token_ids))
        self.seen.append(request)
        self.started += 1
        stopped = self.running[request.request_id] = asyncio.Event()
        done = False
        try:
            await self._while(lambda: self.paused is not None, stopped)
            async for chunk in self._chunks(request, stopped):
                done = chunk.finish_reason in ("stop", "length")
                self.generated_tokens += len(chunk.token_ids)
                yield chunk
        except FaultHit:
            done = True
            raise
        finally:
            self.running.pop(request.request_id, None)
            self._ring()
            self.finished += done
            self.aborted += not done

    async def _chunks(self, request: GenerateRequest, stopped: asyncio.Event) -> AsyncGenerator[Chunk]:
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "status":
            raise FaultHit(fault)
        ids, reason, token_s = self._reply(request)
        greedy = self._greedy(request.sampling)
        last = len(ids) if fault is None else min(fault.after_tokens, len(ids))
        step = self.chunk_tokens or max(len(ids), 1)
        for start in range(0, last, step):
            end = min(start + step, last)
            if await self._wait(stopped, token_s * (end - start)):
                yield Chunk([], [], self.label, "abort")
                return
            logprobs = [logprob_of(token_id, greedy=greedy) for token_id in ids[start:end]]
            yield Chunk(ids[start:end], logprobs, self.label, reason if end == len(ids) else None)
        if fault is not None and last < len(ids):
            if fault.kind == "drop":
                raise FaultHit(fault)
            await stopped.wait()
            yield Chunk([], [], self.label, "abort")

    def _reply(self, request: GenerateRequest) -> tuple[list[int], Literal["stop", "length"], float]:
        """What to say of the scripted reply, and the seconds a token takes."""
        reply, sampling = self.script(list(request.token_ids)), request.sampling
        ids, reason = list(reply.token_ids), reply.finish_reason
        latency_s = self.latency_s if reply.latency_s is None else reply.latency_s
        token_s = latency_s / max(len(ids), 1)
        stops = [ids.index(stop) + 1 for stop in sampling.stop_token_ids if stop in ids]
        if stops:
            ids, reason = ids[: min(stops)], "stop"
        limit = min(sampling.max_tokens, self.context_tokens - len(request.token_ids))
        return (ids[:limit], "length", token_s) if limit < len(ids) else (ids, reason, token_s)

    def _greedy(self, sampling: SamplingParams) -> bool:
        forced = sampling.top_k == 1 or sampling.temperature == 0
        return forced and self.logprobs_mode == "processed"

    async def _wait(self, stopped: asyncio.Event, seconds: float) -> bool:
        """True when it was aborted meanwhile."""
        await self._while(lambda: self._frozen, stopped)
        if not self.gate.is_set():
            waits = {asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(stopped.wait())}
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if seconds > 0 and not stopped.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await stopped.wait()
            except TimeoutError:
                return False
        else:
            await asyncio.sleep(0)
        return stopped.is_set()

    async def pause(self, mode: str) -> None:
        before = list(self.running)
        self.paused, self._frozen = mode, mode == "keep"
        if mode == "abort":
            self.abort(before)
        while mode == "wait" and any(request_id in self.running for request_id in before):
            await self._changed.wait()

    def resume(self) -> None:
        self.paused, self._frozen = None, False
        self._ring()

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _while(self, holds: Callable[[], bool], stopped: asyncio.Event) -> None:
        while holds() and not stopped.is_set():
            waits = {asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(stopped.wait())}
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def abort(self, request_ids: list[str]) -> list[str]:
        """Those that were running. An id may carry vLLM's prefix."""
        found = []
        for request_id in request_ids:
            stopped = self.running.get(request_id.removeprefix("generate-tokens-"))
            if stopped is not None and not stopped.is_set():
                stopped.set()
                found.append(request_id)
        return found


class ScriptedBackend:
    """The engine in process. ``probes`` and ``health_checks`` count what was asked. ``tells`` is what becomes
    of a health before it is told, and may raise; with ``heeds_aborts`` off an abort does nothing."""

    def __init__(self, engine: ScriptedEngine | None = None, *, model: str | None = None) -> None:
        self.engine = engine or ScriptedEngine()
        self.model = model or self.engine.model
        self.probes = 0
        self.health_checks = 0
        self.tells: Callable[[BackendHealth], BackendHealth] = lambda health: health
        self.heeds_aborts = True
        self.closed = False

    async def probe(self) -> BackendInfo:
        self.probes += 1
        engine = self.engine
        if self.model != engine.model:
            raise InvalidInput(self._unserved(), field="model")
        return BackendInfo(
            engine="rollserve-scripted",
            models=[engine.model],
            context_tokens=engine.context_tokens,
            logprobs_mode=engine.logprobs_mode,
            reports_versions=engine.label is not None,
            structured=True,
        )

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        assembly = Assembly(OPERATION)
        assembly.add(Piece([], [], prompt_ids=list(request.token_ids)))
        if on_tokens is not None and not self.engine.refuses_next():
            on_tokens([], [])
        try:
            async with aclosing(self.engine.run(request)) as chunks:
                async for chunk in chunks:
                    before = len(assembly)
                    assembly.add(piece_of(chunk, before))
                    if on_tokens is not None and assembly.hand_over(on_tokens, before):
                        return assembly.aborted()
        except FaultHit as hit:
            raise self._error(hit.fault) from hit
        return assembly.finish()

    def _error(self, fault: Fault) -> Exception:
        if fault.kind != "status":
            return BackendUnavailable(fault.message, operation=OPERATION)
        body = fault.body or fault.message.encode()
        return refusal(
            Answer(fault.status, fault.content_type, body, fault.retry_after_s), operation=OPERATION
        )

    async def abort(self, request_ids: list[str]) -> None:
        if self.heeds_aborts:
            self.engine.abort(request_ids)

    async def score(self, token_ids: list[int], *, model: str) -> list[float]:
        self.engine.check(model, token_ids)
        return self.engine.score(token_ids)

    async def health(self) -> BackendHealth:
        self.health_checks += 1
        engine = self.engine
        return self.tells(
            BackendHealth(
                ok=engine.unhealthy is None,
                detail=engine.unhealthy or "",
                running=len(engine.running),
                waiting=0,
                generated_tokens=engine.generated_tokens if engine.counts_tokens else None,
            )
        )

    async def look(self) -> BackendHealth:
        health = await self.health()
        if health.ok and self.model != self.engine.model and self.model not in self.engine.adapters:
            return BackendHealth(ok=False, detail=self._unserved())
        return health

    def _unserved(self) -> str:
        return f"does not serve the model {self.model!r}; it serves: {self.engine.model}"

    async def close(self) -> None:
        self.closed = True


def piece_of(chunk: Chunk, before: int) -> Piece:
    """With its span counted from the start of the reply."""
    spans = None
    if chunk.label is not None:
        end = before + len(chunk.token_ids)
        spans = [(before, end, chunk.label)] if end > before else []
    return Piece(chunk.token_ids, chunk.logprobs, chunk.finish_reason, None, spans)
