from __future__ import annotations

import asyncio

import pytest

from rollserve.errors import FailureKind, InfrastructureFailure
from rollserve.executor.base import AttemptEnded
from rollserve.records.rollout import GroupState, RolloutState
from rollserve.records.run import RetrySettings
from rollserve.rollouts.retries import FREE_LOSSES, INTERRUPTIONS
from rollserve.store.sql import SqlStore
from rollserve.store.values import Finish, Finished
from rollserve.testing.clock import FakeClock
from rollserve.testing.fakes_server import FakeExecutor, completes, ended, failed, fails
from rollserve.testing.server_room import MakeRoom, Room

QUICK = RetrySettings(max_attempts=3, backoff_s=0)


async def test_starts_as_much_as_fits_and_the_next_when_one_ends(room: Room) -> None:
    run = await room.run()
    await room.submit(run, groups=3, rollouts=4)
    await room.started(8)
    room.executor.join(capacity=1)
    await room.started(9)
    assert len(room.executor.history) == 9
    room.executor.end(room.executor.history[0].attempt_id, ended(room.executor.history[0]))
    await room.started(10)
    assert len(room.executor.history) == 10


async def test_spreads_over_workers_by_free_capacity(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(workers=2, capacity=4)) as room:
        run = await room.run()
        await room.until(lambda: room.core.workers == 2)
        await room.submit(run, groups=1, rollouts=4)
        await room.started(4)
        holders = [worker for worker, _ in room.executor.started.values()]
        assert sorted(holders) == ["w1", "w1", "w2", "w2"]


async def test_an_attempt_carries_its_run_task_and_place(room: Room) -> None:
    run = await room.run(name="named")
    [group] = await room.submit(run, rollouts=2)
    await room.started(2)
    first, second = room.executor.history
    assert (first.index, second.index) == (0, 1)
    assert (first.group_id, first.run_id, first.epoch) == (group.id, run.id, 1)
    assert first.run() == run.spec
    assert first.task() == group.task


async def test_infrastructure_failures_are_tried_again_and_the_history_kept(room: Room) -> None:
    run = await room.run(retry=QUICK)
    [group] = await room.submit(run)
    room.executor.play = fails(failed(FailureKind.INFRASTRUCTURE, "sandbox_error"))
    rollout = await room.ended(group, RolloutState.FAILED)
    assert (rollout.attempts, rollout.epoch, rollout.reward) == (3, 3, None)
    assert rollout.failure is not None
    assert rollout.failure.code == "sandbox_error"
    attempts = (await room.core.groups.attempts(rollout.id)).items
    assert [attempt.epoch for attempt in attempts] == [1, 2, 3]
    assert all(attempt.failure for attempt in attempts)


async def test_a_retry_can_succeed(room: Room) -> None:
    run = await room.run(retry=QUICK)
    [group] = await room.submit(run)
    await room.started(1)
    first = room.executor.history[0]
    room.executor.end(first.attempt_id, ended(first, failure=failed(FailureKind.GRADER)))
    await room.started(2)
    second = room.executor.history[1]
    room.executor.end(second.attempt_id, ended(second, reward=0.5))
    rollout = await room.ended(group, RolloutState.COMPLETED)
    assert (rollout.reward, rollout.failure) == (0.5, None)


async def test_agent_failures_are_final_and_may_count_as_a_reward(room: Room) -> None:
    run = await room.run(failure_rewards={"agent": -1.0})
    room.executor.play = fails(failed(FailureKind.AGENT))
    [group] = await room.submit(run)
    rollout = await room.ended(group, RolloutState.FAILED)
    assert (rollout.attempts, rollout.reward) == (1, -1.0)


async def test_the_back_off_is_waited_for(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(retry=RetrySettings(max_attempts=3, backoff_s=10))
        [group] = await room.submit(run)
        await room.started(1)
        first = room.executor.history[0]
        room.executor.end(first.attempt_id, ended(first, failure=failed(FailureKind.INFRASTRUCTURE)))
        rollout = await room.ended(group, RolloutState.QUEUED)
        assert rollout.not_before == pytest.approx(clock.now() + 10, abs=0.1)
        before = clock.timers
        await room.until(lambda: clock.timers >= before)
        assert len(room.executor.history) == 1
        await room.until(lambda: _turned(clock, room))


async def _turned(clock: FakeClock, room: Room) -> bool:
    if len(room.executor.history) == 1:
        await clock.advance(2.5)
    return len(room.executor.history) == 2


async def test_a_lost_workers_attempts_run_again_elsewhere_uncounted(room: Room) -> None:
    run = await room.run()
    [group] = await room.submit(run, rollouts=3)
    await room.started(3)
    room.executor.kill("w1")
    await room.started(6)
    assert {worker for worker, _ in room.executor.started.values()} == {"w2"}
    rollout = await room.rollout(group)
    assert (rollout.state, rollout.attempts, rollout.epoch) == (RolloutState.RUNNING, 0, 2)
    history = (await room.core.groups.attempts(rollout.id)).items
    assert history[0].failure is not None
    assert history[0].failure.code == "worker_lost"


async def test_a_task_that_kills_its_worker_each_time_ends(room: Room) -> None:
    run = await room.run(retry=RetrySettings(max_attempts=2, backoff_s=0))

    def dies(executor: FakeExecutor, worker_id: str, _: object) -> None:
        asyncio.get_running_loop().call_soon(executor.kill, worker_id)

    room.executor.play = dies
    [group] = await room.submit(run)
    rollout = await room.ended(group, RolloutState.FAILED)
    assert rollout.epoch == 2 + FREE_LOSSES
    assert len(room.executor.history) == 2 + FREE_LOSSES


async def test_a_repeated_report_changes_nothing_and_is_acknowledged_again(room: Room) -> None:
    run = await room.run()
    [group] = await room.submit(run, rollouts=2)
    await room.started(2)
    first = room.executor.history[0]
    for _ in range(3):
        room.executor.end(first.attempt_id, ended(first, reward=1.0))
    await room.ended(group, RolloutState.COMPLETED)
    room.executor.end(first.attempt_id, ended(first, reward=0.0))
    await room.until(lambda: len(room.executor.acks) >= 2)
    assert {(ack.attempt_id, ack.accepted) for ack in room.executor.acks} == {(first.attempt_id, True)}
    assert (await room.rollout(group)).reward == 1.0
    counts = await room.core.runs.counts(run.id)
    assert (counts["completed"], counts["running"]) == (1, 1)


async def test_a_report_that_comes_after_its_worker_was_given_up_on_is_fenced(room: Room) -> None:
    run = await room.run()
    [group] = await room.submit(run)
    await room.started(1)
    old = room.executor.history[0]
    ref = room.payloads.keep("late", await room.payloads.read_live("", ""))
    room.executor.kill("w1")
    await room.started(2)
    late = ended(old, reward=0.0, payload=ref)
    room.executor.say("w2", AttemptEnded(attempt_json=late.model_dump_json().encode()))
    await room.until(lambda: room.executor.acks)
    assert (await room.rollout(group)).state is RolloutState.RUNNING
    history = (await room.core.groups.attempts(old.rollout_id)).items
    assert "fenced" in history[0].detail
    assert (history[0].payload, room.executor.acks[0].accepted) == (ref, True)
    assert ref in room.payloads.kept


async def test_what_a_lost_attempt_had_recorded_is_kept(room: Room) -> None:
    run = await room.run()
    [group] = await room.submit(run)
    await room.started(1)
    [old] = room.executor.history
    room.payloads.open_segment(run.id, old.attempt_id).append_log("$ make")
    room.executor.kill("w1")
    await room.started(2)
    recorded = await room.core.trajectories.of_attempt(old.attempt_id)
    assert (recorded.live, recorded.payload.log) == (False, [(0.0, "$ make")])
    assert (await room.rollout(group)).epoch == 2


async def test_a_record_that_cant_be_salvaged_costs_nothing_else(room: Room) -> None:
    async def refuse() -> None:
        raise InfrastructureFailure("the disk refused", operation="payload.salvage")

    room.payloads.before_salvage = refuse
    run = await room.run()
    [group] = await room.submit(run)
    await room.started(1)
    room.executor.kill("w1")
    await room.started(2)
    history = (await room.core.groups.attempts((await room.rollout(group)).id)).items
    assert history[0].payload is None


async def test_a_queued_rollout_is_cancelled_at_once_a_running_one_by_its_worker(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(capacity=1)) as room:
        run = await room.run()
        running, queued = await room.submit(run, groups=2)
        await room.started(1)
        outcome = await room.core.groups.cancel_group(queued.id)
        assert (outcome.ended, outcome.stopping) == (1, 0)
        assert (await room.core.groups.get(queued.id)).state is GroupState.CANCELLED
        start = room.executor.history[0]
        outcome = await room.core.groups.cancel_rollout(start.rollout_id)
        assert (outcome.ended, outcome.stopping) == (0, 1)
        assert [cancel.attempt_id for cancel in room.executor.cancels] == [start.attempt_id]
        assert (await room.rollout(running)).state is RolloutState.RUNNING
        stopped = ended(start, failure=failed(FailureKind.CANCELLED), outcome=RolloutState.CANCELLED)
        room.executor.end(start.attempt_id, stopped)
        await room.ended(running, RolloutState.CANCELLED)


async def test_a_cancelled_rollout_is_not_tried_again_when_its_attempt_fails(room: Room) -> None:
    run = await room.run(retry=QUICK)
    [group] = await room.submit(run)
    await room.started(1)
    start = room.executor.history[0]
    await room.core.groups.cancel_rollout(start.rollout_id)
    room.executor.kill("w1")
    await room.ended(group, RolloutState.CANCELLED)
    assert len(room.executor.history) == 1


async def test_a_cancel_during_the_commit_of_a_retry_wins(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    committing, go_on = asyncio.Event(), asyncio.Event()
    finish_attempt = SqlStore.finish_attempt

    async def slow(self: SqlStore, finish: Finish) -> Finished:
        committing.set()
        await go_on.wait()
        return await finish_attempt(self, finish)

    monkeypatch.setattr(SqlStore, "finish_attempt", slow)
    run = await room.run(retry=QUICK)
    [group] = await room.submit(run)
    await room.started(1)
    start = room.executor.history[0]
    room.executor.end(start.attempt_id, ended(start, failure=failed(FailureKind.INFRASTRUCTURE)))
    await committing.wait()
    await room.core.groups.cancel_rollout(start.rollout_id)
    go_on.set()
    await room.ended(group, RolloutState.CANCELLED)
    assert len(room.executor.history) == 1


async def test_an_end_is_committed_once_the_store_is_back(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_attempt = SqlStore.finish_attempt
    refused: list[str] = []

    async def flaky(self: SqlStore, finish: Finish) -> Finished:
        if len(refused) < 2:
            refused.append(finish.attempt.id)
            raise OSError("disk full")
        return await finish_attempt(self, finish)

    monkeypatch.setattr(SqlStore, "finish_attempt", flaky)
    room.executor.play = completes()
    run = await room.run()
    [group] = await room.submit(run)
    await room.ended(group, RolloutState.COMPLETED)
    assert len(refused) == 2


async def test_paused_runs_and_policies_start_nothing_and_resume_by_themselves(room: Room) -> None:
    run = await room.run()
    await room.core.runs.pause(run.id)
    await room.submit(run)
    other = await room.core.runs.open(run.spec)
    await room.submit(other)
    await room.started(1)
    assert [start.run_id for start in room.executor.history] == [other.id]
    await room.core.policies.set_paused("pol", True)
    await room.core.runs.resume(run.id)
    await room.submit(other)
    await room.until(lambda: room.core.runs.counts(run.id))
    assert len(room.executor.history) == 1
    await room.core.policies.set_paused("pol", False)
    await room.started(3)


async def test_closing_a_run_ends_what_it_has(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(capacity=2)) as room:
        run = await room.run()
        await room.submit(run, groups=2, rollouts=2)
        await room.started(2)
        _, outcome = await room.core.runs.close(run.id)
        assert (outcome.ended, outcome.stopping) == (2, 2)
        assert len(room.executor.cancels) == 2
        again, outcome = await room.core.runs.close(run.id)
        assert (again.state.value, outcome.ended) == ("closed", 0)


async def test_the_stage_of_a_running_rollout_is_known(room: Room) -> None:
    run = await room.run()
    [group] = await room.submit(run)
    await room.started(1)
    rollout = await room.rollout(group)
    assert room.core.stage_of(rollout.id) == "init"
    room.executor.stage(room.executor.history[0].attempt_id, "grade")
    await room.until(lambda: room.core.stage_of(rollout.id) == "grade")


async def test_an_attempt_its_worker_forgot_is_given_up_on(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(capacity=2), clock=clock) as room:
        run = await room.run(retry=QUICK)
        [group] = await room.submit(run)
        await room.started(1)
        wall_s = group.task.limits.wall_s
        await clock.advance(wall_s + 60)
        assert (await room.rollout(group)).state is RolloutState.RUNNING
        await clock.advance(120)
        await room.started(2)
        history = (await room.core.groups.attempts(room.executor.history[0].rollout_id)).items
        assert history[0].failure is not None
        assert history[0].failure.code == "overdue"
        assert [cancel.reason for cancel in room.executor.cancels] == ["overdue"]


async def test_recovery_runs_again_what_ran(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor()) as room:
        run = await room.run()
        [group] = await room.submit(run, rollouts=2)
        await room.started(2)
        done, interrupted = room.executor.history
        room.executor.end(done.attempt_id, ended(done))
        await room.ended(group, RolloutState.COMPLETED)
        room.payloads.open_segment(run.id, interrupted.attempt_id).append_log("$ make")
        payloads = room.payloads
    async with make_room(FakeExecutor(), payloads=payloads) as room:
        await room.started(1)
        [start] = room.executor.history
        recorded = await room.core.trajectories.of_attempt(interrupted.attempt_id)
        assert recorded.payload.log == [(0.0, "$ make")]
        assert (start.index, start.epoch) == (1, 2)
        assert room.payloads.swept is not None
        room.executor.end(start.attempt_id, ended(start))
        await room.until(lambda: _all_ended(room, group.id))
        rollouts = await room.core.groups.rollouts_of(group.id)
        assert [rollout.attempts for rollout in rollouts] == [1, 1]
        assert [rollout.epoch for rollout in rollouts] == [1, 2]


async def _all_ended(room: Room, group_id: str) -> bool:
    return (await room.core.groups.get(group_id)).state is GroupState.FINISHED


async def test_what_a_stop_interrupts_is_not_held_against_it(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor()) as room:
        run = await room.run()
        [group] = await room.submit(run, rollouts=3)
        await room.started(3)
        done, abandoned, lost = room.executor.history
        room.core.begin_stop()
        room.executor.end(done.attempt_id, ended(done))
        stopped = ended(abandoned, failure=failed(FailureKind.CANCELLED), outcome=RolloutState.CANCELLED)
        room.executor.end(abandoned.attempt_id, stopped)
        room.executor.kill("w1", replace=False)
    async with make_room(FakeExecutor()) as room:
        await room.started(2)
        assert {start.index for start in room.executor.history} == {abandoned.index, lost.index}
        rollouts = await room.core.groups.rollouts_of(group.id)
        assert [rollout.state for rollout in rollouts].count(RolloutState.COMPLETED) == 1
        for start in room.executor.history:
            [first, _] = (await room.core.groups.attempts(start.rollout_id)).items
            assert first.failure is not None
            assert first.failure.code not in INTERRUPTIONS
