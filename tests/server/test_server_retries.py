from __future__ import annotations

import pytest

from rollserve.backoff import backoff_s
from rollserve.errors import FailureKind, ProgramMissing
from rollserve.records.rollout import Attempt, Failure, RolloutState
from rollserve.records.run import RetrySettings, RunSpec
from rollserve.rollouts.retries import FREE_LOSSES, WORKER_LOST, Past, decide

RUN = RunSpec(policy="p", retry=RetrySettings(max_attempts=3, backoff_s=2, max_backoff_s=5))
NEW = Past(tries=0, interruptions=0, cancelled=False)


def attempt(
    outcome: RolloutState, kind: FailureKind | None = None, code: str = "x", reward: float | None = None
) -> Attempt:
    failure = None if kind is None else Failure(kind=kind, code=code, message="m")
    return Attempt(
        id="a", rollout_id="r", epoch=1, started_at=0, outcome=outcome, failure=failure, reward=reward
    )


def test_a_completed_attempt_completes_even_when_a_cancel_came_too_late() -> None:
    done = attempt(RolloutState.COMPLETED, reward=1.0)
    finish = decide(done, RUN, Past(tries=0, interruptions=0, cancelled=True), now=10, jitter=1)
    assert finish.target is RolloutState.COMPLETED
    assert finish.attempt.reward == 1.0


def test_a_program_that_is_not_in_the_image_is_not_looked_for_again() -> None:
    missing = attempt(RolloutState.FAILED, FailureKind.INFRASTRUCTURE, code=ProgramMissing.code)
    finish = decide(missing, RUN, NEW, now=10, jitter=1)
    assert finish.target is RolloutState.FAILED
    assert finish.attempt.reward is None


@pytest.mark.parametrize("kind", [FailureKind.INFRASTRUCTURE, FailureKind.GRADER])
def test_ours_are_tried_again_until_the_bound(kind: FailureKind) -> None:
    first = decide(attempt(RolloutState.FAILED, kind), RUN, NEW, now=10, jitter=1)
    assert (first.target, first.not_before, first.counts_as_try) == (RolloutState.QUEUED, 12.0, True)
    last = decide(
        attempt(RolloutState.FAILED, kind),
        RUN,
        Past(tries=2, interruptions=0, cancelled=False),
        now=10,
        jitter=1,
    )
    assert last.target is RolloutState.FAILED
    assert last.attempt.reward is None


@pytest.mark.parametrize("kind", [FailureKind.AGENT, FailureKind.LIMIT])
def test_theirs_are_final_and_without_reward(kind: FailureKind) -> None:
    finish = decide(attempt(RolloutState.FAILED, kind, reward=0.5), RUN, NEW, now=10, jitter=1)
    assert finish.target is RolloutState.FAILED
    assert finish.attempt.reward is None


def test_a_named_failure_counts_as_the_named_reward() -> None:
    run = RUN.model_copy(update={"failure_rewards": {"agent": -1.0}})
    crash = decide(attempt(RolloutState.FAILED, FailureKind.AGENT), run, NEW, now=10, jitter=1)
    assert crash.attempt.reward == -1.0
    limit = decide(attempt(RolloutState.FAILED, FailureKind.LIMIT), run, NEW, now=10, jitter=1)
    assert limit.attempt.reward is None


def test_a_cancel_that_was_asked_for_is_final_whatever_the_attempt_says() -> None:
    asked = Past(tries=0, interruptions=0, cancelled=True)
    finish = decide(attempt(RolloutState.FAILED, FailureKind.INFRASTRUCTURE), RUN, asked, now=10, jitter=1)
    assert finish.target is RolloutState.CANCELLED
    assert finish.attempt.outcome is RolloutState.CANCELLED
    assert finish.attempt.failure is not None
    assert finish.attempt.failure.kind is FailureKind.CANCELLED


def test_a_cancel_nobody_asked_for_is_an_interruption() -> None:
    finish = decide(attempt(RolloutState.CANCELLED, FailureKind.CANCELLED), RUN, NEW, now=10, jitter=1)
    assert (finish.target, finish.counts_as_try) == (RolloutState.QUEUED, False)
    assert finish.attempt.failure is not None
    assert finish.attempt.failure.kind is FailureKind.INFRASTRUCTURE


def test_losing_workers_is_free_only_so_often() -> None:
    lost = attempt(RolloutState.FAILED, FailureKind.INFRASTRUCTURE, WORKER_LOST)
    tries, interruptions, attempts = 0, 0, 0
    while True:
        past = Past(tries=tries, interruptions=interruptions, cancelled=False)
        finish = decide(lost, RUN, past, now=10, jitter=1)
        attempts += 1
        tries += finish.counts_as_try
        interruptions += 1
        if finish.target is not RolloutState.QUEUED:
            break
    assert finish.target is RolloutState.FAILED
    assert attempts == RUN.retry.max_attempts + FREE_LOSSES


def test_an_end_without_a_reason_is_ours() -> None:
    finish = decide(attempt(RolloutState.FAILED), RUN, NEW, now=10, jitter=1)
    assert finish.target is RolloutState.QUEUED
    assert finish.attempt.failure is not None


def test_back_off_doubles_up_to_its_bound_and_spreads_over_its_upper_half() -> None:
    assert [backoff_s(failures, 2, 5) for failures in (1, 2, 3)] == [2, 4, 5]
    assert backoff_s(2, 2, 5, jitter=0.0) == 2
    assert backoff_s(10_000, 1, 30) == 30
