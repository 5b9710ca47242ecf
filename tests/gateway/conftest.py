"""A gateway over a scripted pool and a segment in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from rollserve.backend.base import GenerateRequest, Generation, Routed, TokenSink, unrefunded
from rollserve.errors import BackendUnavailable
from rollserve.executor.base import PolicyView
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.rendering import Rendering
from rollserve.gateway.service import GatewayService
from rollserve.gateway.sessions import GatewaySession
from rollserve.gateway.tokens import TextTokenizer, load_tokenizer
from rollserve.records.call import Call, unpack_ids
from rollserve.records.policy import (
    Backend,
    BackendInfo,
    BackendSpec,
    BackendState,
    Policy,
    PolicySpec,
    RendererSpec,
)
from rollserve.records.run import RunSpec
from rollserve.records.task import Limits
from rollserve.records.update import WeightUpdate
from rollserve.store.payload import EndState

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in a persistent shell.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for what other tasks bring about."""
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


Script = Callable[[GenerateRequest], Generation]


def _begun(generation: Generation, tokens: int) -> Generation:
    """The first tokens of a generation that was stopped."""
    ids, logprobs = generation.token_ids[:tokens], generation.logprobs[:tokens]
    return replace(generation, token_ids=ids, logprobs=logprobs, finish_reason="abort")


@dataclass
class MemorySegment:
    calls: list[Call] = field(default_factory=list)
    artifacts: list[tuple[str, bytes]] = field(default_factory=list)
    broken: OSError | None = None

    def append_call(self, call: Call) -> None:
        if self.broken is not None:
            raise self.broken
        self.calls.append(call)

    def append_log(self, line: str) -> None:
        raise AssertionError(line)

    def append_artifact(self, path: str, data: bytes) -> None:
        self.artifacts.append((path, data))

    def append_call_rewards(self, rewards: dict[str, float]) -> None:
        raise AssertionError(rewards)

    def append_end(self, end: EndState) -> None:
        raise AssertionError(end)

    async def seal(self) -> Any:
        raise AssertionError

    def leave(self) -> None:
        raise AssertionError

    def discard(self) -> None:
        raise AssertionError


@dataclass
class PauseCounter:
    """An ``ActiveClock`` that counts pauses, and refunds asked for."""

    now: int = 0
    total: int = 0
    refunds: int = 0

    def refundable(self) -> Callable[[], None]:
        def refund() -> None:
            self.refunds += 1

        return refund

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.now += 1
        self.total += 1
        try:
            yield
        finally:
            self.now -= 1


class ScriptedPool:
    """Answers with ``script``; ``gate`` holds answers back, ``pace`` holds each token."""

    def __init__(self) -> None:
        self.script: Script = lambda request: Generation(token_ids=[], logprobs=[], finish_reason="stop")
        self.info = BackendInfo(engine="scripted", models=["tiny"], logprobs_mode="processed")
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.gate: asyncio.Event | None = None
        self.pace: Callable[[int], Any] | None = None
        self.started = asyncio.Event()
        self.closed = False
        self.admits = True
        self.stall: BackendUnavailable | None = None
        self.asked: list[tuple[str, float]] = []
        self.lost_tries = 0

    def update(self, backends: list[Backend]) -> None:
        self.backends = backends

    def hold(self, update: WeightUpdate | None) -> None:
        self.held = update

    def stats(self) -> dict[str, dict[str, Any]]:
        return {backend.id: {"state": backend.state.value} for backend in self.backends}

    async def generate(
        self,
        session_id: str,
        request: GenerateRequest,
        on_tokens: TokenSink | None = None,
        *,
        pause: Callable[[], AbstractContextManager[None]] = nullcontext,
        refundable: Callable[[], Callable[[], None]] = unrefunded,
    ) -> Routed:
        self.requests.append(request)
        self.started.set()
        for _ in range(self.lost_tries):
            refundable()()
        if on_tokens is not None and self.admits:
            on_tokens([], [])
        try:
            if self.gate is not None:
                await self.gate.wait()
            generation = self.script(request)
            for index, (token_id, logprob) in enumerate(
                zip(generation.token_ids, generation.logprobs, strict=False)
            ):
                if on_tokens is not None and on_tokens([token_id], [logprob]):
                    self.aborted.append(request.request_id)
                    return Routed(generation=_begun(generation, index + 1), backend_id="b1", info=self.info)
                if self.pace is not None:
                    await self.pace(index)
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        return Routed(generation=generation, backend_id="b1", info=self.info)

    async def stalled(self, session_id: str, run_s: float) -> BackendUnavailable | None:
        self.asked.append((session_id, run_s))
        return self.stall

    def release(self, session_id: str) -> None:
        self.released.append(session_id)

    async def close(self) -> None:
        self.closed = True


class World:
    """A gateway that knows the policy ``p`` and one backend."""

    def __init__(self, tokenizer: TextTokenizer, **settings: Any) -> None:
        self.tokenizer = tokenizer
        self.pool = ScriptedPool()
        self.pool.script = self.says("ok")
        self.service = GatewayService(lambda policy: self.pool, base_url="http://gateway", **settings)
        self.segments: list[MemorySegment] = []
        self.clock = PauseCounter()
        self.url = "http://b1"
        self.revision = 0
        self.spec = PolicySpec(name="p", model="tiny", tokenizer="tiny", renderer=RendererSpec())
        self.view()

    def view(
        self,
        *,
        version: int = 0,
        paused: bool = False,
        labels: dict[str, int] | None = None,
        active: bool = True,
        context_tokens: int | None = None,
        update: WeightUpdate | None = None,
        weights: int = 0,
    ) -> None:
        """The policy's next revision."""
        self.revision += 1
        policy = Policy(
            spec=self.spec,
            version=version,
            paused=paused,
            labels=labels or {},
            update=update,
            weights=weights,
        )
        backend = Backend(
            id="b1",
            policy="p",
            spec=BackendSpec(url=self.url),
            info=self.pool.info.model_copy(update={"context_tokens": context_tokens}),
            state=BackendState.ACTIVE if active else BackendState.DRAINING,
        )
        self.service.update_policy(
            PolicyView(
                revision=self.revision,
                policy_json=policy.model_dump_json().encode(),
                backends_json=[backend.model_dump_json().encode()],
            )
        )

    def view_of(self, name: str, *, model: str, paused: bool = False, **changes: Any) -> None:
        """Another policy, of the same pool and tokenizer; ``changes`` are of its specification."""
        self.revision += 1
        spec = self.spec.model_copy(update={"name": name, "model": model, **changes})
        backend = Backend(id="b2", policy=name, spec=BackendSpec(url="http://b2"), info=self.pool.info)
        backend = backend.model_copy(update={"state": BackendState.ACTIVE})
        self.service.update_policy(
            PolicyView(
                revision=self.revision,
                policy_json=Policy(spec=spec, paused=paused).model_dump_json().encode(),
                backends_json=[backend.model_dump_json().encode()],
            )
        )

    def ids(self, text: str, *, stop: bool = True) -> list[int]:
        """What a model samples for ``text``, control tokens in it included."""
        ids = self.tokenizer.encode(text)
        return [*ids, *([self.tokenizer.eos_token_id] if stop and self.tokenizer.eos_token_id else [])]

    def generation(self, text: str, **changes: Any) -> Generation:
        finish = changes.pop("finish_reason", "stop")
        ids = self.ids(text, stop=finish == "stop")
        fields: dict[str, Any] = {
            "token_ids": ids,
            "logprobs": [-0.5 - index / 100 for index in range(len(ids))],
            "finish_reason": finish,
        }
        return Generation(**{**fields, **changes})

    def says(self, *texts: str, **changes: Any) -> Script:
        """One text after another; the last for ever."""
        left = list(texts)

        def script(request: GenerateRequest) -> Generation:
            return self.generation(left.pop(0) if len(left) > 1 else left[0], **changes)

        return script

    async def open(self, **changes: Any) -> GatewaySession:
        """A session; ``run`` and ``limits`` are updates of their defaults."""
        segment = MemorySegment()
        self.segments.append(segment)
        return await self.service.open_session(
            SessionSpec(
                attempt_id="a1",
                rollout_id="r1",
                run=RunSpec(**{"policy": "p", **changes.get("run", {})}),
                limits=Limits(**changes.get("limits", {})),
                segment=segment,
                clock=self.clock,
                on_call=changes.get("on_call"),
            )
        )


def context(calls: list[Call], leaf: Call) -> list[int]:
    """Ids root → ``leaf``, its sampled ones left out."""
    by_id = {call.id: call for call in calls}
    ids: list[int] = unpack_ids(leaf.prompt_ids).tolist()
    while leaf.parent is not None:
        leaf = by_id[leaf.parent]
        ids = [*unpack_ids(leaf.prompt_ids).tolist(), *unpack_ids(leaf.sampled_ids).tolist(), *ids]
    return ids


@pytest.fixture(scope="session")
def tiny() -> TextTokenizer:
    return load_tokenizer("tiny")


@pytest.fixture(scope="session")
def qwen3(tiny: TextTokenizer) -> Rendering:
    return Rendering(RendererSpec(), tiny, "keep")


@pytest.fixture
async def world(tiny: TextTokenizer) -> AsyncIterator[World]:
    made = World(tiny)
    yield made
    await made.service.close()
