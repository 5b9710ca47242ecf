"""Re-grading by graders that ask models: what is refused, what workers are told, and where the tokens are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollserve.errors import Conflict, FailureKind, InvalidInput, UnknownName
from rollserve.executor.base import StartRegrading
from rollserve.records.policy import BackendSpec, BackendState, PolicySpec
from rollserve.records.regrade import Graded, JudgeRoute, Regrade, Regrading, RegradingState
from rollserve.records.run import RetrySettings, RouteSpec, Run, SamplingSettings
from rollserve.records.task import GraderSpec
from rollserve.records.update import UpdateMode
from rollserve.store.payload import AttemptPayload
from rollserve.store.values import Bin
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, a_call, completes, failed
from rollserve.testing.server_room import MakeRoom, Room

EXACT = GraderSpec(name="exact")
JUDGE = {"judge": JudgeRoute(policy="jury")}
GOOD = Graded(state=RegradingState.GRADED, reward=0.5)
QUICK = RetrySettings(max_attempts=2, backoff_s=0.01, max_backoff_s=0.01)


async def a_jury(room: Room) -> str:
    """A policy to ask; returns its backend's id."""
    await room.core.policies.create(PolicySpec(name="jury", model="j", tokenizer="tiny"))
    return (await room.core.policies.register("jury", BackendSpec(url="http://jury:1"))).id


async def a_run(room: Room, rollouts: int = 1, **settings: Any) -> Run:
    run = await room.run(**settings)
    await room.submit(run, 1, rollouts)

    async def over() -> bool:
        return (await room.store.run_counts(run.id))["completed"] == rollouts

    await room.until(over)
    return run


async def done(room: Room, regrade: Regrade) -> list[Regrading]:
    async def over() -> bool:
        counts = (await room.core.regrades.get(regrade.id))[1]
        return not counts["queued"] and not counts["running"]

    await room.until(over)
    return (await room.core.regrades.regradings(regrade.id, state=None, cursor=None, limit=100)).items


def asked(room: Room, start: StartRegrading, *sampled: int) -> None:
    """The worker has recorded calls that sampled so many tokens each."""
    calls = [a_call(f"j{at}", sampled=tokens) for at, tokens in enumerate(sampled)]
    room.payloads.live[f"{start.run_id}/{start.owner}"] = AttemptPayload(calls=calls)


async def regraded_bin(room: Room, run: Run) -> Bin | None:
    return (await room.store.run_bins(run.id)).get("tokens", {}).get("regraded")


async def test_the_routes_of_the_request_or_those_that_the_run_has_for_graders(make_room: MakeRoom) -> None:
    executor = FakeExecutor(play=completes())
    executor.grade = lambda executor, worker, start: executor.graded(worker, start, GOOD)
    async with make_room(executor) as room:
        await a_jury(room)
        cold = SamplingSettings(temperature=0.0)
        routes = {
            "judge": RouteSpec(policy="jury", stages=("run", "grade"), sampling=cold, train=True),
            "user": RouteSpec(policy="jury"),
        }
        run = await a_run(room, routes=routes)
        begin = room.core.regrades.begin
        for given, expected in (
            (None, {"judge": RouteSpec(policy="jury", stages=("grade",), sampling=cold)}),
            ({"second": JudgeRoute(policy="jury")}, {"second": RouteSpec(policy="jury", stages=("grade",))}),
            ({}, {}),
        ):
            regrade = await begin(run.id, EXACT, routes=given)
            await done(room, regrade)
            told = executor.regradings[-1][1].run()
            assert (told.routes, told.policy) == (expected, "pol")
            stored, _ = await room.core.regrades.get(regrade.id)
            assert {name: route.route() for name, route in stored.routes.items()} == expected
        first = await begin(run.id, EXACT, "key", routes=JUDGE)
        assert (await begin(run.id, EXACT, "key", routes=JUDGE)).id == first.id
        with pytest.raises(Conflict):
            await begin(run.id, EXACT, "key", routes={})


async def test_a_route_that_nothing_answers_is_refused_before_anything_begins(make_room: MakeRoom) -> None:
    executor = FakeExecutor(play=completes())
    async with make_room(executor) as room:
        backend_id = await a_jury(room)
        run = await a_run(room, routes={"judge": RouteSpec(policy="jury", stages=("grade",))})

        async def refusal(policy: str = "jury", **change: Any) -> InvalidInput:
            backend = await room.store.get_backend(backend_id)
            await room.store.put_backend(backend.model_copy(update=change))
            with pytest.raises(InvalidInput) as caught:
                await room.core.regrades.begin(run.id, EXACT, routes={"judge": JudgeRoute(policy=policy)})
            await room.store.put_backend(backend)
            assert caught.value.field == "routes.judge.policy"
            return caught.value

        unknown = await refusal("jurj")
        assert isinstance(unknown, UnknownName)
        assert "did you mean 'jury'" in str(unknown)
        other = await refusal(spec=BackendSpec(url="http://jury:1/other"))
        assert "serves 'another-model', not the policy's model 'j'" in other.message
        away = await refusal(spec=BackendSpec(url="http://jury:1/nothing"))
        assert "an nginx answers there" in away.message
        for state in (BackendState.DRAINING, BackendState.FENCED):
            assert "no backend that could answer" in (await refusal(state=state)).message
        await room.core.policies.remove("jury", backend_id)
        with pytest.raises(InvalidInput, match="no backend that could answer"):
            await room.core.regrades.begin(run.id, EXACT)  # the run's own route
        assert (await room.core.regrades.of_run(run.id, cursor=None, limit=9)).items == []
        assert executor.regradings == []
        await room.core.regrades.begin(run.id, EXACT, routes={})


async def test_a_request_that_comes_again_does_not_need_its_judge(make_room: MakeRoom) -> None:
    """Its answer was lost, and the judge is gone since: the regrade of then comes back."""
    async with make_room(FakeExecutor(play=completes())) as room:
        backend_id = await a_jury(room)
        run = await a_run(room)
        begin = room.core.regrades.begin
        first = await begin(run.id, EXACT, "key", routes=JUDGE)
        await room.core.policies.remove("jury", backend_id)
        assert await begin(run.id, EXACT, "key", routes=JUDGE) == first
        with pytest.raises(Conflict):
            await begin(run.id, EXACT, "key", routes={})
        with pytest.raises(InvalidInput, match="no backend that could answer"):
            await begin(run.id, EXACT, "another", routes=JUDGE)


async def test_a_judge_amid_an_update_of_its_weights_is_waited_for(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(play=completes())) as room:
        backend_id = await a_jury(room)
        run = await a_run(room)
        backend = await room.store.get_backend(backend_id)
        await room.core.updates.begin("jury", UpdateMode.DRAIN, 60.0)
        silent = BackendSpec(url="http://jury:1/nothing")  # as a paused engine may be
        await room.store.put_backend(backend.model_copy(update={"spec": silent}))
        assert (await room.core.regrades.begin(run.id, EXACT, routes=JUDGE)).routes == JUDGE


async def test_what_judges_sampled_is_in_a_bin_of_its_own_each_try_once(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    executor = FakeExecutor(play=completes(payloads))
    async with make_room(executor, payloads=payloads) as room:
        await a_jury(room)
        run = await a_run(room, retry=QUICK)
        before = (await room.store.run_bins(run.id))["tokens"]
        regrade = await room.core.regrades.begin(run.id, EXACT, routes=JUDGE)
        await room.until(lambda: len(executor.regradings) == 1)
        lost_by, first = executor.regradings[0]
        asked(room, first, 5, 2)
        executor.kill(lost_by)
        await room.until(lambda: len(executor.regradings) == 2)
        assert await regraded_bin(room, run) == Bin(count=1, tokens=7)
        worker, second = executor.regradings[1]
        executor.graded(worker, first, GOOD)  # of the try that was given up
        asked(room, second, 11)
        trouble = Graded(state=RegradingState.FAILED, failure=failed(FailureKind.GRADER))
        executor.graded(worker, second, trouble)
        (grading,) = await done(room, regrade)
        assert (grading.state, grading.reward) == (RegradingState.FAILED, None)
        assert await regraded_bin(room, run) == Bin(count=2, tokens=18)
        bins = (await room.store.run_bins(run.id))["tokens"]
        del bins["regraded"]
        assert bins == before  # the attempts' own are where they were
        assert payloads.live == {}
        assert set(payloads.kept) == {f"{run.id}/{grading.attempt_id}"}


async def test_a_worker_lost_amid_the_end_of_a_try_does_not_end_it_again(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    executor = FakeExecutor(play=completes(payloads))
    async with make_room(executor, payloads=payloads) as room:
        await a_jury(room)
        run = await a_run(room, rollouts=2, retry=QUICK)
        regrade = await room.core.regrades.begin(run.id, EXACT, routes=JUDGE)
        await room.until(lambda: len(executor.regradings) == 2)
        (worker, told), (_, other) = executor.regradings
        asked(room, told, 5)
        looking, on = asyncio.Event(), asyncio.Event()

        async def held() -> None:
            if not looking.is_set():
                looking.set()
                await on.wait()

        payloads.before_salvage = held
        executor.graded(worker, told, GOOD)
        await looking.wait()
        executor.kill(worker)  # it had the other one too, which is settled last
        await room.until(lambda: any(each.tries == 2 for _, each in executor.regradings))
        again = [each.rollout_id for _, each in executor.regradings[2:]]
        on.set()
        assert again == [other.rollout_id]
        executor.graded(*executor.regradings[2], GOOD)
        assert [(each.tries, each.reward) for each in await done(room, regrade)] == [(1, 0.5), (2, 0.5)]
        assert await regraded_bin(room, run) == Bin(count=1, tokens=5)


async def test_what_was_sampled_when_the_server_died_is_counted(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    async with make_room(FakeExecutor(play=completes(payloads)), payloads=payloads) as room:
        await a_jury(room)
        run = await a_run(room, rollouts=2)
        regrade = await room.core.regrades.begin(run.id, EXACT, routes=JUDGE)
        await room.until(lambda: len(room.executor.regradings) == 2)
        asked(room, room.executor.regradings[1][1], 3, 4)
    executor = FakeExecutor()
    executor.grade = lambda executor, worker, start: executor.graded(worker, start, GOOD)
    async with make_room(executor, payloads=payloads) as room:
        assert [each.reward for each in await done(room, regrade)] == [0.5, 0.5]
        assert await regraded_bin(room, run) == Bin(count=1, tokens=7)
        assert len(payloads.kept) == 2  # the attempts'


async def test_a_record_that_can_not_be_read_fails_no_grading(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    executor = FakeExecutor(play=completes(payloads))
    async with make_room(executor, payloads=payloads) as room:
        await a_jury(room)
        run = await a_run(room)
        regrade = await room.core.regrades.begin(run.id, EXACT, routes=JUDGE)
        await room.until(lambda: len(executor.regradings) == 1)
        worker, start = executor.regradings[0]
        asked(room, start, 3)
        payloads.unreadable.add(f"{start.run_id}/{start.owner}")
        executor.graded(worker, start, GOOD)
        assert [each.reward for each in await done(room, regrade)] == [0.5]
        assert await regraded_bin(room, run) is None


async def test_a_regrade_without_routes_asks_nobody(make_room: MakeRoom) -> None:
    executor = FakeExecutor(play=completes())
    async with make_room(executor) as room:
        run = await a_run(room)
        await room.core.regrades.begin(run.id, EXACT)
        await room.until(lambda: len(executor.regradings) == 1)
        assert executor.regradings[0][1].run().routes == {}
