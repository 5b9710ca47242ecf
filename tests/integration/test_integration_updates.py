"""Updates of the weights of real inference servers while calls are in flight: what each token was sampled
under is what its record says. The server's core, the gateway and its pool are real; no sandbox is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rollserve.backend.engine_control import make_control
from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.backend.registry import make_backend
from rollserve.executor.base import ToWorker
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.service import GatewayService
from rollserve.localserver.model import BatchModel, load_model
from rollserve.localserver.server import LocalServer, ServerSettings, make_app
from rollserve.records.call import Call, Message, unpack_floats, unpack_ids
from rollserve.records.policy import BackendKind, BackendSpec, BackendState, Policy, PolicySpec, RendererSpec
from rollserve.records.run import RunSpec
from rollserve.records.task import Limits
from rollserve.records.update import UpdateMode, UpdateState, WeightUpdate
from rollserve.rollouts.clock import ActiveTimer, SystemClock
from rollserve.testing.asgi import served
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor
from rollserve.testing.server_room import Room, a_room
from rollserve.trainers.tiny.model import make_model, save_model
from rollserve.trainers.weights import LocalWeights

CALLS = 8
TOKENS = 300


class OneWorker(FakeExecutor):
    """Tells a gateway in this process what workers are told."""

    def __init__(self) -> None:
        super().__init__()
        self.gateway = GatewayService(
            lambda policy: BackendPool(model=policy.spec.model, settings=PoolSettings(slow_start_s=0.0))
        )

    def broadcast(self, message: ToWorker) -> None:
        super().broadcast(message)
        self.gateway.update_policy(self.views[-1])


@dataclass
class World:
    room: Room
    worker: OneWorker
    folder: Path
    models: dict[int, Any]
    servers: dict[str, LocalServer] = field(default_factory=dict)
    payloads: FakePayloads = field(default_factory=FakePayloads)

    async def begin(self, mode: UpdateMode, lease_s: float = 60.0) -> WeightUpdate:
        update = await self.room.core.updates.begin("p", mode, lease_s)

        async def ready() -> bool:
            return (await self.room.core.updates.get("p", update.id)).state is UpdateState.READY

        await self.room.until(ready)
        return update

    async def push(self, version: int, *urls: str) -> None:
        for url in urls:
            sync = LocalWeights(url, self.folder / url.rsplit(":", 1)[1])
            await sync.push(self.models[version].state_dict(), version)

    def figures(self, version: int, ids: list[int]) -> list[float]:
        return scores(self.models[version], ids)

    async def commit(self, update: WeightUpdate, version: int, *, figures: bool = True) -> Policy:
        told = self.figures(version, update.canary_ids) if figures else None
        return await self.room.core.updates.commit("p", update.id, version, None, told)

    async def calls(self) -> list[Call]:
        """Some at once, each of its own session."""
        await asyncio.gather(*(self._call(n) for n in range(CALLS)))
        return [call for payload in self.payloads.live.values() for call in payload.calls]

    async def _call(self, number: int) -> None:
        timer = ActiveTimer(SystemClock(), total_s=1e6, wall_s=1e6)
        session = await self.worker.gateway.open_session(
            SessionSpec(
                attempt_id=f"a{number}",
                rollout_id=f"r{number}",
                run=RunSpec.model_validate({"policy": "p", "sampling": {"max_tokens": TOKENS}}),
                limits=Limits(),
                segment=self.payloads.open_segment("run", f"a{number}-{len(self.payloads.live)}"),
                clock=timer,
            )
        )
        await session.model.chat([Message(role="user", content=f"question {number}")])

    @property
    def sampled(self) -> int:
        return sum(server.engine.counters.generated_tokens for server in self.servers.values())

    async def until_sampling(self, tokens: int) -> None:
        before = self.sampled
        await self.room.until(lambda: self.sampled >= before + tokens)

    def states(self) -> dict[str, BackendState]:
        return {backend.spec.url: backend.state for backend in self.worker.views[-1].backends()}


@torch.no_grad()
def scores(model: Any, ids: list[int]) -> list[float]:
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    found: list[float] = (
        logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1).tolist()
    )
    return found


Make = Callable[[int], Awaitable[World]]


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[Make]:
    """``await make_world(servers)``: so many local servers with the weights of version 0."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:

        async def make(servers: int) -> World:
            models = {version: make_model(seed=20 + version) for version in range(3)}
            save_model(models[0], tmp_path / "model")
            worker = OneWorker()
            room = await stack.enter_async_context(
                a_room(tmp_path, worker, open_backend=make_backend, controls=make_control)
            )
            stack.push_async_callback(worker.gateway.close)
            world = World(room, worker, tmp_path / "weights", models)
            spec = PolicySpec(
                name="p",
                model="m",
                tokenizer="tiny",
                renderer=RendererSpec(name="qwen3", options={"enable_thinking": False}),
            )
            await room.core.policies.create(spec)
            for _ in range(servers):
                batch = BatchModel(
                    load_model(str(tmp_path / "model"), device="cpu", dtype="float32"), max_batch=16
                )
                server = LocalServer(batch, ServerSettings(served_model_name="m", weight_version="0"))
                url = await stack.enter_async_context(served(make_app(server), lifespan="on"))
                world.servers[url] = server
                await room.core.policies.register("p", BackendSpec(url=url, kind=BackendKind.LOCAL))
            return world

        yield make
    torch.set_num_threads(before)


def parts(call: Call) -> list[tuple[int, bool, list[float], list[int]]]:
    """Version, whether it is mixed, logprobs, and offsets of each stretch."""
    logprobs = unpack_floats(call.logprobs).tolist()
    return [
        (span.version, span.mixed, logprobs[span.start : span.end], list(range(span.start, span.end)))
        for span in call.versions
    ]


def worst(world: World, call: Call, version: int, offsets: list[int]) -> float:
    """How far the recorded logprobs at ``offsets`` are from those of the version's own model."""
    prompt, sampled = unpack_ids(call.prompt_ids).tolist(), unpack_ids(call.sampled_ids).tolist()
    ours = scores(world.models[version], [*prompt, *sampled])[len(prompt) - 1 :]
    theirs: list[float] = unpack_floats(call.logprobs).tolist()
    return max((abs(ours[at] - theirs[at]) for at in offsets), default=0.0)


async def test_calls_that_an_update_stops_go_on_under_the_new_weights(make_world: Make) -> None:
    world = await make_world(2)
    calling = asyncio.create_task(world.calls())
    await world.until_sampling(CALLS * 20)
    update = await world.begin(UpdateMode.ABORT)
    made = world.sampled
    await asyncio.sleep(0.05)
    assert world.sampled == made, "nothing is sampled while the weights change"
    await world.push(1, *world.servers)
    policy = await world.commit(update, 1)
    assert policy.canary is not None
    assert policy.canary.verdict == "verified"
    calls = await calling
    assert len(calls) == CALLS
    split = [call for call in calls if len(call.versions) == 2]
    assert len(split) >= CALLS // 2
    for call in calls:
        assert call.inexact is None
        assert call.finish_reason in ("stop", "length", "tool_calls")
        for version, mixed, _, offsets in parts(call):
            assert not mixed
            assert worst(world, call, version, offsets) < 1e-3
    for call in split:
        assert [span.version for span in call.versions] == [0, 1]
        assert worst(world, call, 0, parts(call)[1][3]) > 0.1, "the second part is not the old model's"


async def test_calls_that_are_kept_are_marked_where_their_cache_is_older(make_world: Make) -> None:
    world = await make_world(1)
    calling = asyncio.create_task(world.calls())
    await world.until_sampling(CALLS * 20)
    update = await world.begin(UpdateMode.KEEP)
    await world.push(1, *world.servers)
    await world.commit(update, 1)
    calls = await calling
    split = [call for call in calls if len(call.versions) == 2]
    assert len(split) >= CALLS // 2
    for call in split:
        (old, mixed_old, _, first), (new, mixed_new, _, second) = parts(call)
        assert (old, mixed_old, new, mixed_new) == (0, False, 1, True)
        assert worst(world, call, 0, first) < 1e-3
        assert worst(world, call, 1, second) > 1e-3, "on a cache that the new weights did not make"
    after = (await world.calls())[CALLS:]
    for call in after:
        assert [(version, mixed) for version, mixed, _, _ in parts(call)] == [(1, False)]
        assert worst(world, call, 1, parts(call)[0][3]) < 1e-3


async def test_calls_drain_under_the_old_weights(make_world: Make) -> None:
    world = await make_world(1)
    calling = asyncio.create_task(world.calls())
    await world.until_sampling(CALLS * 5)
    update = await world.begin(UpdateMode.DRAIN)
    assert len(await calling) == CALLS
    await world.push(1, *world.servers)
    await world.commit(update, 1)
    for call in await world.calls():
        ((version, mixed, _, offsets),) = parts(call)
        assert not mixed
        assert worst(world, call, version, offsets) < 1e-3


async def test_a_server_that_kept_its_old_weights_is_found_and_not_used(make_world: Make) -> None:
    world = await make_world(2)
    fresh, stale = world.servers
    update = await world.begin(UpdateMode.ABORT)
    await world.push(1, fresh)
    policy = await world.commit(update, 1)
    assert policy.canary is not None
    assert policy.canary.verdict == "failed"
    assert world.states() == {fresh: BackendState.ACTIVE, stale: BackendState.FENCED}
    before = world.servers[stale].engine.counters.generated_tokens
    calls = await world.calls()
    assert world.servers[stale].engine.counters.generated_tokens == before
    for call in calls:
        assert worst(world, call, 1, parts(call)[0][3]) < 1e-3


async def test_a_trainer_that_dies_does_not_park_real_servers(make_world: Make) -> None:
    world = await make_world(2)
    await world.room.core.updates.set_version("p", 0, "zero")
    one, half = world.servers
    calling = asyncio.create_task(world.calls())
    await world.until_sampling(CALLS * 5)
    update = await world.begin(UpdateMode.ABORT, lease_s=1.5)
    await world.push(1, half)
    calls = await calling
    assert len(calls) == CALLS
    over = await world.room.core.updates.get("p", update.id)
    assert over.state is UpdateState.EXPIRED
    assert world.states() == {one: BackendState.ACTIVE, half: BackendState.FENCED}
    for call in calls:
        for version, _, _, offsets in parts(call):
            assert worst(world, call, version, offsets) < 1e-3
