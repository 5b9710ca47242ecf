"""Updates of a policy's weights on a real store, with servers that only act, on a clock that is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from rollserve.backend.base import Backend as Client
from rollserve.config import Settings
from rollserve.errors import (
    BackendUnavailable,
    Conflict,
    InvalidInput,
    LeaseLost,
    NotFound,
    StaleEpoch,
    VersionRegression,
)
from rollserve.executor.base import BackendReport, WorkerStats
from rollserve.records.policy import BackendKind, BackendSpec, BackendState, PolicySpec
from rollserve.records.update import UpdateMode, UpdateState, WeightUpdate
from rollserve.testing.clock import FakeClock
from rollserve.testing.fakes_server import FakeControls, FakeExecutor
from rollserve.testing.scripted import ScriptedBackend, ScriptedEngine
from rollserve.testing.server_room import MakeRoom, Room

STATS = WorkerStats(at=0.0, stages={}, counters={}, loop_lag_ms_p99=0.0, rss_mb=1.0, cpu_s=0.0)
A, B, C = "http://a", "http://b", "http://c"


class Fleet:
    """An engine behind each address; ``load`` gives some of them other weights."""

    def __init__(self) -> None:
        self.engines: dict[str, ScriptedEngine] = {}

    def engine(self, url: str) -> ScriptedEngine:
        return self.engines.setdefault(url, ScriptedEngine(model="m"))

    def open(self, spec: BackendSpec, model: str) -> Client:
        return ScriptedBackend(self.engine(spec.url))

    def load(self, shift: float, *urls: str) -> None:
        for url in urls:
            self.engine(url).score_shift = shift

    def scores(self, url: str, ids: list[int]) -> list[float]:
        return self.engine(url).score(ids)


class Bench:
    def __init__(self, room: Room, clock: FakeClock, fleet: Fleet, controls: FakeControls) -> None:
        self.room = room
        self.clock = clock
        self.fleet = fleet
        self.updates = room.core.updates
        self.controls = controls

    async def policy(self, *urls: str, name: str = "pol", kind: BackendKind = BackendKind.VLLM) -> None:
        await self.room.core.policies.create(PolicySpec(name=name, model="m", tokenizer="tiny"))
        for url in urls:
            await self.room.core.policies.register(name, BackendSpec(url=url, kind=kind))

    async def begin(self, mode: UpdateMode = UpdateMode.DRAIN, lease_s: float = 60.0) -> WeightUpdate:
        """Until it is ready."""
        update = await self.updates.begin("pol", mode, lease_s)
        return await self.ready(update)

    async def ready(self, update: WeightUpdate) -> WeightUpdate:
        async def met() -> bool:
            return (await self.updates.get("pol", update.id)).state is not UpdateState.PAUSING

        await self.room.until(met)
        return await self.updates.get("pol", update.id)

    async def states(self) -> dict[str, BackendState]:
        return {b.spec.url: b.state for b in await self.room.core.policies.registered("pol")}

    async def events(self) -> list[str]:
        listed = await self.room.store.list_events(after=0)
        return [e.type for e in listed if e.type.startswith(("policy.update", "policy.canary", "backend.f"))]

    async def until_over(self, update: WeightUpdate) -> WeightUpdate:
        async def met() -> bool:
            await self.clock.advance(1.0)
            seen = await self.updates.get("pol", update.id)
            return not seen.open and seen.resumed

        await self.room.until(met)
        return await self.updates.get("pol", update.id)

    def told(self, url: str) -> list[str]:
        return [what for said, what in self.controls.said if said == url and what != "check"]

    def held(self) -> WeightUpdate | None:
        """What the workers were told last."""
        update = self.room.executor.views[-1].policy().update
        return update if update is not None and update.open else None


@asynccontextmanager
async def a_bench(
    make_room: MakeRoom, controls: FakeControls | None = None, settings: Settings | None = None
) -> AsyncIterator[Bench]:
    clock, fleet, controls = FakeClock(), Fleet(), controls or FakeControls()
    made = make_room(
        FakeExecutor(), clock=clock, controls=controls, open_backend=fleet.open, settings=settings
    )
    async with made as room:
        yield Bench(room, clock, fleet, controls)
        assert controls.open == 0, "a client of a server was left open"


@pytest.fixture
async def bench(make_room: MakeRoom) -> AsyncIterator[Bench]:
    async with a_bench(make_room) as bench:
        yield bench


# ── begin, commit, abort


async def test_a_whole_update(bench: Bench) -> None:
    await bench.policy(A, B)
    update = await bench.begin(UpdateMode.KEEP)
    assert update.state is UpdateState.READY
    async with asyncio.timeout(30):  # workers hear of it a moment after the trainer
        while bench.held() != update:
            await asyncio.sleep(0.01)
    assert bench.told(A) == bench.told(B) == ["pause keep"]
    bench.fleet.load(0.5, A, B)
    policy = await bench.updates.commit("pol", update.id, 1, "step-1", None)
    assert (policy.version, policy.labels, policy.weights) == (1, {"step-1": 1}, 1)
    assert bench.told(A) == bench.told(B) == ["pause keep", "announce step-1", "resume"]
    assert bench.held() is None
    assert policy.canary is not None
    assert policy.canary.verdict == "verified"
    assert policy.update is not None
    assert (policy.update.state, policy.update.resumed) == (UpdateState.COMMITTED, True)
    assert await bench.events() == [
        "policy.update_pausing",
        "policy.update_ready",
        "policy.update_committed",
        "policy.canary",
    ]


async def test_workers_hold_before_a_server_is_paused_and_go_on_after_it_is_resumed(bench: Bench) -> None:
    await bench.policy(A)
    bench.controls.gate.clear()
    update = await bench.updates.begin("pol", UpdateMode.ABORT, 60.0)
    assert update.state is UpdateState.PAUSING
    assert bench.held() is not None
    assert bench.told(A) == []
    with pytest.raises(Conflict, match="not ready"):
        await bench.updates.commit("pol", update.id, 1, None, None)
    bench.controls.gate.set()
    await bench.ready(update)
    assert bench.told(A) == ["pause abort"]


async def test_the_same_commit_again_is_answered_the_same(bench: Bench) -> None:
    await bench.policy(A)
    update = await bench.begin()
    first = await bench.updates.commit("pol", update.id, 1, None, None)
    again = await bench.updates.commit("pol", update.id, 1, None, None)
    assert again.weights == first.weights
    with pytest.raises(LeaseLost, match="committed"):
        await bench.updates.commit("pol", update.id, 2, None, None)


async def test_an_aborted_update_goes_on_as_before(bench: Bench) -> None:
    await bench.policy(A)
    update = await bench.begin(UpdateMode.ABORT)
    over = await bench.updates.abort("pol", update.id)
    assert (over.state, over.detail) == (UpdateState.ABORTED, "aborted by the trainer")
    assert bench.told(A) == ["pause abort", "resume"]
    assert bench.held() is None
    assert (await bench.room.core.policies.get("pol")).version == 0
    assert (await bench.updates.abort("pol", update.id)).state is UpdateState.ABORTED
    with pytest.raises(LeaseLost, match="aborted"):
        await bench.updates.renew("pol", update.id, None)


async def test_only_that_policys_backends_are_touched(bench: Bench) -> None:
    await bench.policy(A)
    await bench.policy(B, name="other")
    update = await bench.begin()
    await bench.updates.commit("pol", update.id, 1, None, None)
    assert bench.told(B) == []


async def test_a_server_of_two_policies_is_known_as_shared(bench: Bench) -> None:
    await bench.policy(A, B)
    await bench.policy(B, name="other")
    one, two = await bench.room.core.policies.registered("pol")
    assert await bench.room.core.policies.shared_with(one) is None
    assert await bench.room.core.policies.shared_with(two) == "other"


async def test_where_an_engine_does_not_wait_the_workers_tell(make_room: MakeRoom) -> None:
    controls = FakeControls()
    controls.waits = False
    async with a_bench(make_room, controls) as bench:
        await bench.policy(A)
        (backend,) = await bench.room.core.policies.registered("pol")
        update = await bench.updates.begin("pol", UpdateMode.DRAIN, 60.0)

        async def heard(held: str, in_flight: int) -> UpdateState:
            facts = {backend.id: {"held": held, "in_flight": in_flight}}
            bench.room.executor.say("w1", structs.replace(STATS, backends=facts))
            for _ in range(20):
                await bench.clock.advance(0.1)
            return (await bench.updates.get("pol", update.id)).state

        assert await heard("", 0) is UpdateState.PAUSING, "it has not heard of the update"
        assert await heard(update.id, 1) is UpdateState.PAUSING
        assert bench.told(A) == []
        await heard(update.id, 0)
        await bench.ready(update)
        assert bench.told(A) == ["pause drain"]


# ── what is wrong is said


async def test_begun_twice(bench: Bench) -> None:
    await bench.policy(A)
    update = await bench.begin()
    with pytest.raises(Conflict, match=f"update {update.id} .* is open"):
        await bench.updates.begin("pol", UpdateMode.DRAIN, 60.0)
    with pytest.raises(Conflict, match="is open"):
        await bench.updates.set_version("pol", 3, None)


async def test_a_commit_with_an_old_version_or_a_label_of_another(bench: Bench) -> None:
    await bench.policy(A)
    await bench.updates.set_version("pol", 5, "five")
    update = await bench.begin()
    with pytest.raises(VersionRegression) as regression:
        await bench.updates.commit("pol", update.id, 4, None, None)
    assert regression.value.field == "version"
    with pytest.raises(Conflict) as conflict:
        await bench.updates.commit("pol", update.id, 6, "five", None)
    assert conflict.value.field == "label"
    await bench.updates.commit("pol", update.id, 6, None, None)


async def test_figures_of_the_wrong_length(bench: Bench) -> None:
    await bench.policy(A)
    update = await bench.begin()
    with pytest.raises(InvalidInput, match="3 logprobs; canary_ids have 31") as error:
        await bench.updates.commit("pol", update.id, 1, None, [-1.0] * 3)
    assert error.value.field == "canary"


async def test_no_backends_none_that_answers_or_one_that_cant_be_paused(bench: Bench) -> None:
    await bench.policy()
    with pytest.raises(Conflict, match="no backends") as error:
        await bench.begin()
    assert error.value.field == "backends"
    await bench.policy(A)
    bench.controls.away.add(A)
    with pytest.raises(Conflict, match="no backend answers"):
        await bench.begin()
    bench.controls.away.clear()
    bench.controls.fixed.add(A)
    with pytest.raises(InvalidInput, match="can't be paused"):
        await bench.begin()
    assert (await bench.room.core.policies.get("pol")).update is None


async def test_an_unknown_update(bench: Bench) -> None:
    await bench.policy(A)
    with pytest.raises(NotFound):
        await bench.updates.commit("pol", "up_none", 1, None, None)


async def test_a_trainer_that_was_rewound_is_fenced(bench: Bench) -> None:
    run = await bench.room.run()
    await bench.room.core.policies.register("pol", BackendSpec(url=A))
    update = await bench.begin()
    await bench.room.core.deliveries.rewind(run.id, "default", None)
    with pytest.raises(StaleEpoch, match="rewound"):
        await bench.updates.commit("pol", update.id, 9, None, None)


# ── leases


async def test_a_trainer_that_dies_parks_nothing(bench: Bench) -> None:
    await bench.policy(A)
    update = await bench.begin(lease_s=30)
    await bench.clock.advance(29)
    assert (await bench.updates.get("pol", update.id)).open
    over = await bench.until_over(update)
    assert over.state is UpdateState.EXPIRED
    assert over.detail == "the trainer did not commit within its lease; version 0 goes on"
    assert bench.told(A) == ["pause drain", "resume"]
    await bench.room.until(lambda: bench.held() is None)
    assert "policy.update_expired" in await bench.events()
    with pytest.raises(LeaseLost, match="expired"):
        await bench.updates.commit("pol", update.id, 1, None, None)


async def test_a_lease_is_renewed(bench: Bench) -> None:
    await bench.policy(A)
    update = await bench.begin(lease_s=30)
    await bench.clock.advance(20)
    await bench.updates.renew("pol", update.id, 100)
    await bench.clock.advance(90)
    await bench.updates.commit("pol", update.id, 1, None, None)


async def test_a_server_that_starts_again_ends_what_was_open(make_room: MakeRoom) -> None:
    controls = FakeControls()
    async with a_bench(make_room, controls) as bench:
        await bench.policy(A)
        update = await bench.begin(lease_s=30)
    async with a_bench(make_room, controls) as bench:
        assert bench.held() is not None, "the new workers hold, too"
        bench.clock._start += 1000
        over = await bench.until_over(update)
        assert over.state is UpdateState.EXPIRED
        assert bench.told(A)[-1] == "resume"


async def test_a_pause_that_a_restart_interrupted_is_made_again(make_room: MakeRoom) -> None:
    controls = FakeControls()
    controls.gate.clear()
    async with a_bench(make_room, controls) as bench:
        await bench.policy(A)
        update = await bench.updates.begin("pol", UpdateMode.DRAIN, 60.0)
    controls.gate.set()
    async with a_bench(make_room, controls) as bench:
        assert (await bench.ready(update)).state is UpdateState.READY
        assert bench.told(A) == ["pause drain"]


async def test_an_engine_that_did_not_hear_is_told_again(bench: Bench) -> None:
    await bench.policy(A, B)
    update = await bench.begin()
    bench.controls.away.add(B)
    over = await bench.updates.abort("pol", update.id)
    assert not over.resumed
    bench.controls.away.clear()
    await bench.until_over(update)
    assert bench.told(B)[-1] == "resume"


# ── backends that go away, and those that lie


async def test_one_that_was_away_during_the_update_is_fenced_until_it_proves_itself(bench: Bench) -> None:
    await bench.policy(A, B, C)
    bench.controls.away.add(C)
    update = await bench.begin()
    assert len(update.backends) == 2
    assert "does not answer" in update.detail
    bench.fleet.load(0.5, A, B)
    await bench.updates.commit("pol", update.id, 1, None, None)
    states = await bench.states()
    assert states == {A: BackendState.ACTIVE, B: BackendState.ACTIVE, C: BackendState.FENCED}
    bench.controls.away.clear()
    update = await bench.begin()
    bench.fleet.load(0.7, A, B, C)
    await bench.updates.commit("pol", update.id, 2, None, None)
    assert (await bench.states())[C] is BackendState.ACTIVE


async def test_a_commit_that_reaches_no_engine_can_be_made_again(bench: Bench) -> None:
    await bench.policy(A)
    update = await bench.begin()
    bench.controls.away.add(A)
    with pytest.raises(BackendUnavailable, match="no backend could be told"):
        await bench.updates.commit("pol", update.id, 1, None, None)
    bench.controls.away.clear()
    assert (await bench.updates.commit("pol", update.id, 1, None, None)).version == 1


async def test_a_backend_that_silently_keeps_old_weights_is_fenced_off_and_named(bench: Bench) -> None:
    await bench.policy(A, B)
    update = await bench.begin()
    bench.fleet.load(0.5, A, B)
    await bench.updates.commit("pol", update.id, 1, None, None)
    update = await bench.begin()
    bench.fleet.load(0.503, A)
    policy = await bench.updates.commit("pol", update.id, 2, None, None)
    assert policy.canary is not None
    assert policy.canary.verdict == "failed"
    assert await bench.states() == {A: BackendState.ACTIVE, B: BackendState.FENCED}
    stale = next(b for b in await bench.room.core.policies.registered("pol") if b.spec.url == B)
    assert stale.error == "canary at version 2: it still serves the old weights"
    told = {b.spec.url: b.state for b in bench.room.executor.views[-1].backends()}
    assert told[B] is BackendState.FENCED, "workers hear of it with the version"


async def test_a_single_backend_is_caught_by_the_trainers_figures(bench: Bench) -> None:
    await bench.policy(A)
    update = await bench.begin()
    policy = await bench.updates.commit("pol", update.id, 1, None, None)
    assert policy.canary is not None
    assert policy.canary.verdict == "unverified"
    assert "one backend, and no figures" in policy.canary.detail
    update = await bench.begin()
    figures = [value - 0.4 for value in bench.fleet.scores(A, update.canary_ids)]
    policy = await bench.updates.commit("pol", update.id, 2, None, figures)
    assert (await bench.states())[A] is BackendState.FENCED
    update = await bench.begin()
    bench.fleet.load(0.4, A)
    figures = bench.fleet.scores(A, update.canary_ids)
    policy = await bench.updates.commit("pol", update.id, 3, None, figures)
    assert policy.canary is not None
    assert policy.canary.verdict == "verified"
    assert (await bench.states())[A] is BackendState.ACTIVE


async def test_two_that_disagree_need_figures(bench: Bench) -> None:
    await bench.policy(A, B)
    await bench.updates.set_version("pol", 1, None)
    update = await bench.begin()
    bench.fleet.load(0.9, A)
    bench.fleet.load(0.4, B)
    with pytest.raises(Conflict, match="send the trainer's figures") as error:
        await bench.updates.commit("pol", update.id, 2, None, None)
    assert error.value.field == "canary"
    assert bench.held() is not None, "nothing is sampled meanwhile"
    figures = bench.fleet.scores(B, update.canary_ids)
    await bench.updates.commit("pol", update.id, 2, None, figures)
    assert await bench.states() == {A: BackendState.FENCED, B: BackendState.ACTIVE}


async def test_after_an_expired_lease_half_loaded_weights_are_fenced(bench: Bench) -> None:
    await bench.policy(A, B)
    await bench.updates.set_version("pol", 1, None)
    update = await bench.begin(lease_s=30)
    bench.fleet.load(0.5, B)
    await bench.until_over(update)
    await bench.room.until(lambda: bench.held() is None)
    assert await bench.states() == {A: BackendState.ACTIVE, B: BackendState.FENCED}


async def test_the_simple_way_is_checked_too(bench: Bench) -> None:
    await bench.policy(A, B, C)
    await bench.updates.set_version("pol", 1, None)
    bench.fleet.load(0.5, A, B)
    policy = await bench.updates.set_version("pol", 2, None)
    assert policy.canary is not None
    assert policy.canary.verdict == "failed"
    assert (await bench.states())[C] is BackendState.FENCED
    again = await bench.updates.set_version("pol", 2, None)
    assert again.weights == policy.weights


async def test_without_canary_nothing_is_scored(make_room: MakeRoom) -> None:
    settings = Settings.model_validate({"backends": {"canary": False}})
    async with a_bench(make_room, settings=settings) as bench:
        await bench.policy(A)
        update = await bench.begin()
        assert update.canary_ids == []
        policy = await bench.updates.commit("pol", update.id, 1, None, None)
        assert policy.canary is None
        assert not bench.fleet.engines


async def test_a_fenced_backend_stays_so_whatever_workers_see_of_its_health(bench: Bench) -> None:
    await bench.policy(A)
    (backend,) = await bench.room.core.policies.registered("pol")
    await bench.room.core.policies.fence(backend.id, "wrong weights")
    await bench.room.core.policies.report(BackendReport(backend_id=backend.id, ok=True))
    assert (await bench.states())[A] is BackendState.FENCED
    await bench.room.core.policies.register("pol", BackendSpec(url=A))
    assert (await bench.states())[A] is BackendState.ACTIVE
