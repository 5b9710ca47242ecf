"""A cancel in any stage of an attempt, and releases that fail or hang."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.errors import FailureKind
from rollserve.records.rollout import RolloutState
from rollserve.testing.attempt_bench import AttemptBench as Bench
from rollserve.testing.fakes_worker import hang

from .conftest import judge_after, raising


@pytest.mark.parametrize("stage", ["queue", "create", "open_session", "ready", "run", "grade_wait", "grade"])
async def test_a_cancel_leaves_nothing_in_any_stage(bench: Bench, stage: str) -> None:
    bench.fakes.graders.carry = ()
    blockers = [bench.pools.place() for _ in range(4)]
    if stage == "queue":
        for place in blockers[:2]:
            await place.to_init()
    if stage == "ready":
        for place in blockers:
            await place.to_init()
            place.to_ready()
            await place.to_run()
    if stage == "grade_wait":
        for place in blockers[:2]:
            await place.to_grade()
    if stage in ("create", "open_session"):
        setattr(bench.fakes.hooks, stage, hang)
    if stage == "run":
        bench.fakes.hooks.chat = hang
    if stage == "grade":
        bench.fakes.graders.judges["exact"] = judge_after(bench, 1e6)
    runner = bench.runner()
    task = bench.spawn(runner)
    await bench.clock.settle()
    assert not task.done()
    runner.cancel("not wanted")
    runner.cancel("not wanted any more")
    attempt = await bench.until(task)
    assert attempt.outcome is RolloutState.CANCELLED
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.CANCELLED
    assert attempt.failure.message == "not wanted"
    assert attempt.reward is None
    assert attempt.payload == "run/a"
    assert bench.fakes.leftovers == []
    for place in blockers:
        place.release()
    assert bench.free()
    assert bench.clock.timers == 0


@pytest.mark.parametrize("point", ["close_tools", "close_session", "close_sandbox"])
async def test_a_cancel_does_not_cut_a_release_short(bench: Bench, point: str) -> None:
    releasing, go = asyncio.Event(), asyncio.Event()
    done: list[int] = []

    async def slow() -> None:
        releasing.set()
        await go.wait()
        done.append(1)

    setattr(bench.fakes.hooks, point, slow)
    runner = bench.runner()
    task = bench.spawn(runner)
    await asyncio.wait_for(releasing.wait(), 10)
    runner.cancel("not wanted")
    await bench.clock.settle()
    go.set()
    attempt = await bench.until(task)
    assert attempt.outcome is RolloutState.CANCELLED
    assert done == [1]
    assert "release_errors" not in attempt.detail
    assert bench.fakes.leftovers == []
    assert bench.free()


async def test_a_cancel_before_the_first_step(bench: Bench) -> None:
    runner = bench.runner()
    task = bench.spawn(runner)
    runner.cancel("early")
    attempt = await bench.until(task)
    assert attempt.outcome is RolloutState.CANCELLED
    assert bench.fakes.runtime.made == []


async def test_a_cancel_while_it_is_ending_changes_nothing(bench: Bench) -> None:
    sealing, go = asyncio.Event(), asyncio.Event()

    async def seal() -> None:
        sealing.set()
        await go.wait()

    bench.fakes.payloads.before_seal = seal
    runner = bench.runner()
    task = bench.spawn(runner)
    await asyncio.wait_for(sealing.wait(), 10)
    runner.cancel("late")
    go.set()
    attempt = await bench.until(task)
    assert attempt.outcome is RolloutState.COMPLETED


async def test_an_abandoned_attempt_cleans_up_and_says_nothing(bench: Bench) -> None:
    bench.fakes.hooks.chat = hang
    runner = bench.runner()
    task = bench.spawn(runner)
    await bench.clock.settle()
    runner.abandon()
    assert await asyncio.wait_for(task, 10) is None
    assert bench.fakes.leftovers == []
    assert bench.fakes.payloads.kept == {}
    (left,) = bench.fakes.payloads.left.values()  # what it did is the server's to salvage
    assert left.log
    assert bench.free()


async def test_a_task_cancelled_from_elsewhere_cleans_up_and_passes_it_on(bench: Bench) -> None:
    bench.fakes.hooks.chat = hang
    task = bench.spawn(bench.runner())
    await bench.clock.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.fakes.leftovers == []
    assert bench.free()


@pytest.mark.parametrize("point", ["close_tools", "close_session", "close_sandbox"])
async def test_a_release_that_fails_is_recorded_and_masks_nothing(bench: Bench, point: str) -> None:
    setattr(bench.fakes.hooks, point, raising(RuntimeError("stuck mount")))
    attempt = await bench.play()
    assert attempt.outcome is RolloutState.COMPLETED
    assert attempt.reward == 1.0
    assert any("stuck mount" in error for error in attempt.detail["release_errors"])
    assert "release failed" in bench.log()
    assert bench.counters["release_errors"] >= 1
    assert bench.free() is (point != "close_sandbox")


@pytest.mark.parametrize("point", ["close_tools", "close_session", "close_sandbox"])
async def test_a_release_that_hangs_meets_its_deadline(bench: Bench, point: str) -> None:
    setattr(bench.fakes.hooks, point, hang)
    attempt = await bench.until(bench.spawn(bench.runner()))
    assert attempt.reward == 1.0
    assert any("not done within" in error for error in attempt.detail["release_errors"])
    assert bench.free() is (point != "close_sandbox")


async def test_a_slot_is_taken_until_its_sandbox_is_confirmed_gone(bench: Bench) -> None:
    tries: list[int] = []

    async def flaky() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("busy")

    bench.fakes.hooks.close_sandbox = flaky
    attempt = await bench.play()
    assert len(attempt.detail["release_errors"]) == 1
    ((left, closed),) = bench.unclosed
    assert bench.fakes.leftovers == [f"sandbox {left[0].id}"]
    assert bench.pools.occupancy()["run"] == 1
    await left[0].close()
    closed()
    closed()
    assert bench.fakes.leftovers == []
    assert bench.free()
