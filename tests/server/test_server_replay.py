"""Re-grading and export, as the server does them: beside what was, without a model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollserve.errors import Conflict, FailureKind, NotFound, UnknownName
from rollserve.executor.base import StartRegrading
from rollserve.records.call import Call
from rollserve.records.control import StalenessRule
from rollserve.records.export import ExportSettings
from rollserve.records.regrade import Graded, Regrade, Regrading, RegradingState
from rollserve.records.run import RetrySettings, Run
from rollserve.records.task import GraderSpec
from rollserve.rollouts.exports import Exported
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, a_call, completes, ended, failed
from rollserve.testing.server_room import MakeRoom, Room

EXACT = GraderSpec(name="exact")
QUICK = RetrySettings(max_attempts=2, backoff_s=0.01, max_backoff_s=0.01)


def gives(reward: float) -> Any:
    def grade(executor: FakeExecutor, worker_id: str, start: StartRegrading) -> None:
        executor.graded(worker_id, start, Graded(state=RegradingState.GRADED, reward=reward))

    return grade


async def done(room: Room, regrade: Regrade) -> list[Regrading]:
    async def over() -> bool:
        counts = (await room.core.regrades.get(regrade.id))[1]
        return not counts["queued"] and not counts["running"]

    await room.until(over)
    page = await room.core.regrades.regradings(regrade.id, state=None, cursor=None, limit=100)
    return page.items


async def exported(room: Room, run: Run, **settings: Any) -> list[Exported]:
    found: list[Exported] = []
    cursor: str | None = None
    while True:
        some, cursor = await room.core.exports.page(
            run.id, ExportSettings(**settings), cursor=cursor, limit=2, weight=1.0
        )
        found += some
        if cursor is None:
            return found


async def a_run(room: Room, groups: int = 1, rollouts: int = 2, **settings: Any) -> Run:
    run = await room.run(**settings)
    await room.submit(run, groups, rollouts)

    async def over() -> bool:
        return (await room.store.run_counts(run.id))["completed"] == groups * rollouts

    await room.until(over)
    return run


async def test_new_gradings_stand_beside_the_old_ones(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    executor = FakeExecutor(play=completes(payloads, reward=0.0))
    executor.grade = gives(0.75)
    async with make_room(executor, payloads=payloads) as room:
        run = await a_run(room, groups=3)
        regrade = await room.core.regrades.begin(run.id, EXACT, "again")
        found = await done(room, regrade)
        assert [(each.state, each.before, each.reward, each.tries) for each in found] == [
            (RegradingState.GRADED, 0.0, 0.75, 1)
        ] * 6
        assert {(await room.store.get_rollout(each.rollout_id)).reward for each in found} == {0.0}
        assert (await room.core.regrades.begin(run.id, EXACT, "again")).id == regrade.id
        other = EXACT.model_copy(update={"options": {"x": 1}})
        with pytest.raises(Conflict):
            await room.core.regrades.begin(run.id, other, "again")
        second = await room.core.regrades.begin(run.id, other)
        assert {each.reward for each in await done(room, second)} == {0.75}
        listed = await room.core.regrades.of_run(run.id, cursor=None, limit=10)
        assert [each.id for each in listed.items] == [regrade.id, second.id]
        events = [event.type for event in await room.store.list_events(after=0)]
        assert events.count("regrade.begun") == events.count("regrade.ended") == 2


async def test_what_it_grades_and_what_it_refuses(make_room: MakeRoom) -> None:
    executor = FakeExecutor()
    executor.grade = gives(1.0)
    async with make_room(executor) as room:
        run = await room.run(retry=RetrySettings(max_attempts=1))
        with pytest.raises(NotFound):
            await room.core.regrades.begin("run_0", EXACT)
        await room.submit(run, 1, 4)
        await room.started(4)
        good, ungraded, crashed, _ = executor.history
        executor.end(good.attempt_id, ended(good, reward=0.5))
        executor.end(ungraded.attempt_id, ended(ungraded, failure=failed(FailureKind.GRADER)))
        executor.end(crashed.attempt_id, ended(crashed, failure=failed(FailureKind.AGENT)))
        await room.until(lambda: len(executor.acks) == 3)
        with pytest.raises(UnknownName) as caught:
            await room.core.regrades.begin(run.id, GraderSpec(name="exakt"))
        assert caught.value.field is not None
        assert caught.value.field.endswith("grader.name")
        regrade = await room.core.regrades.begin(run.id, EXACT)
        found = {each.rollout_id: each for each in await done(room, regrade)}
        assert set(found) == {good.rollout_id, ungraded.rollout_id}
        assert found[ungraded.rollout_id].before is None


async def test_a_lost_worker_and_a_failing_grader_are_tried_again_within_the_bound(
    make_room: MakeRoom,
) -> None:
    executor = FakeExecutor(play=completes())
    async with make_room(executor) as room:
        run = await a_run(room, rollouts=1, retry=QUICK)
        regrade = await room.core.regrades.begin(run.id, EXACT)
        await room.until(lambda: len(executor.regradings) == 1)
        lost_by, first = executor.regradings[0]
        executor.kill(lost_by)
        await room.until(lambda: len(executor.regradings) == 2)
        worker, second = executor.regradings[1]
        assert (first.tries, second.tries) == (1, 2)
        executor.graded(worker, first, Graded(state=RegradingState.GRADED, reward=9.0))  # fenced
        trouble = Graded(state=RegradingState.FAILED, failure=failed(FailureKind.GRADER))
        executor.graded(worker, second, trouble)
        (grading,) = await done(room, regrade)
        assert (grading.state, grading.tries, grading.reward) == (RegradingState.FAILED, 2, None)
        assert grading.graded == trouble


async def test_a_server_that_dies_amid_it_goes_on(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(play=completes())) as room:
        run = await a_run(room, groups=4, rollouts=4)
        regrade = await room.core.regrades.begin(run.id, EXACT)
        await room.until(lambda: len(room.executor.regradings) == 8)
        held = (await room.core.regrades.get(regrade.id))[1]
        assert (held["running"], held["queued"]) == (8, 8)
    executor = FakeExecutor()
    executor.grade = gives(0.25)
    async with make_room(executor) as room:
        found = await done(room, regrade)
        assert [(each.reward, each.tries) for each in found] == [(0.25, 1)] * 16


async def test_cancelled_and_pruned(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(play=completes(), capacity=2)) as room:
        run = await a_run(room, groups=2, rollouts=4)
        regrade = await room.core.regrades.begin(run.id, EXACT)
        await room.until(lambda: len(room.executor.regradings) == 2)
        assert await room.core.regrades.cancel(regrade.id) == 6
        for worker, start in room.executor.regradings:
            room.executor.graded(worker, start, Graded(state=RegradingState.IMPOSSIBLE, note="gone"))
        states = [each.state for each in await done(room, regrade)]
        assert (states.count(RegradingState.CANCELLED), states.count(RegradingState.IMPOSSIBLE)) == (6, 2)
        await room.core.runs.close(run.id)
        await room.core.runs.prune(run.id)
        with pytest.raises(NotFound):
            await room.core.regrades.get(regrade.id)


def forked(payloads: FakePayloads) -> Any:
    """Two calls in a row, and a side call; the first at version 0, the others at 3."""
    new = [at_version(a_call("c2", "c1"), 3), at_version(a_call("s"), 3, label="side")]
    return plays(payloads, [a_call("c1"), *new])


def at_version(call: Call, version: int, **changes: Any) -> Call:
    spans = tuple(msgspec.structs.replace(each, version=version) for each in call.versions)
    return msgspec.structs.replace(call, versions=spans, **changes)


def plays(payloads: FakePayloads, calls: list[Any]) -> Any:
    def play(executor: FakeExecutor, _: str, start: Any) -> None:
        ref = payloads.keep(f"{start.run_id}/{start.attempt_id}", AttemptPayload(calls=calls))
        executor.end(start.attempt_id, ended(start, reward=1.0, payload=ref))

    return play


async def test_samples_by_other_settings(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    async with make_room(FakeExecutor(play=forked(payloads)), payloads=payloads) as room:
        run = await a_run(room, groups=3)

        async def shapes(**settings: Any) -> list[list[tuple[int, int]]]:
            found = await exported(room, run, **settings)
            assert len(found) == 3
            return [
                [(len(sample.ids), int(sample.loss_mask.sum())) for sample in rollout.samples]
                for rollout in found[0].finished.rollouts
            ]

        assert await shapes() == [[(14, 6)]] * 2
        assert await shapes(sequences="calls") == [[(7, 3), (14, 3)]] * 2
        assert await shapes(train_labels=("side",)) == [[(7, 3)]] * 2
        (first, *_) = await exported(
            room, run, version=3, staleness=StalenessRule(max_staleness=1, on_stale="mask")
        )
        (rollout, _) = first.finished.rollouts
        assert (rollout.staleness, rollout.stale) == (3, True)
        assert int(rollout.samples[0].loss_mask.sum()) == 3
        old = StalenessRule(max_staleness=1, on_stale="withhold")
        (first, *_) = await exported(room, run, version=3, staleness=old)
        assert first.finished.rollouts == []
        assert first.left_out is not None
        assert (await exported(room, run, version=1, staleness=old))[0].left_out is None
        assert "delivered" not in (await room.core.runs.bins(run.id))["tokens"]


async def test_inexact_rollouts_are_kept_dropped_or_left_out_whole(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    inexact = msgspec.structs.replace(a_call("c2", "c1"), inexact="backend_ids")
    play = plays(payloads, [a_call("c1"), inexact])
    async with make_room(FakeExecutor(play=play), payloads=payloads) as room:
        run = await a_run(room, rollouts=1)
        (dropped,) = (await exported(room, run))[0].finished.rollouts
        assert [sample.exact for sample in dropped.samples] == [True]
        (text,) = (await exported(room, run, on_inexact="text"))[0].finished.rollouts
        assert [sample.exact for sample in text.samples] == [True, False]
        (none,) = (await exported(room, run, on_inexact="fail"))[0].finished.rollouts
        assert none.samples == []
        assert none.note == "it is not token-exact: backend_ids"


async def test_export_with_the_rewards_of_a_regrade(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    executor = FakeExecutor(play=completes(payloads, reward=0.0))

    def grade(executor: FakeExecutor, worker_id: str, start: StartRegrading) -> None:
        given = Graded(state=RegradingState.GRADED, reward=0.5, call_rewards={"c1": 2.0})
        if len(executor.regradings) == 2:
            given = Graded(state=RegradingState.IMPOSSIBLE, note="no files")
        executor.graded(worker_id, start, given)

    executor.grade = grade
    async with make_room(executor, payloads=payloads) as room:
        run = await a_run(room)
        regrade = await room.core.regrades.begin(run.id, EXACT)
        await done(room, regrade)
        one, other = (await exported(room, run, regrade=regrade.id))[0].finished.rollouts
        assert one.rollout.reward == one.samples[0].reward == 0.5
        assert one.samples[0].rewards.max() == 2.0
        assert (other.samples, other.rollout.reward) == ([], None)
        assert other.note == "its grading is impossible: no files"
        with pytest.raises(NotFound):
            await exported(room, run, regrade="reg_0")
        assert (await exported(room, run))[0].finished.rollouts[0].rollout.reward == 0.0
