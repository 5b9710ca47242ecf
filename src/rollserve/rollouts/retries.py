"""What the end of an attempt means for its rollout. Pure: the one place that decides on retries."""

from __future__ import annotations

from dataclasses import dataclass

from rollserve.backoff import backoff_s
from rollserve.errors import FailureKind
from rollserve.records.rollout import Attempt, Failure, RolloutState
from rollserve.records.run import RunSpec
from rollserve.store.values import Finish

FREE_LOSSES = 5
"""Losses of its worker that are not held against a rollout; a task that kills its worker each time
therefore ends after ``max_attempts + FREE_LOSSES`` attempts."""

WORKER_LOST = "worker_lost"
OVERDUE = "overdue"
STOPPED = "stopped_by_worker"
INTERRUPTIONS = (WORKER_LOST, OVERDUE, STOPPED)
"""Codes of failures that say nothing about the attempt itself."""

STRAGGLER = "straggler"
"""Replaced by another try, which counts: its group's rule says how long one may run."""

NOT_SENT = "not_sent"
"""No worker ever had the attempt; not even an interruption."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """What is known of the rollout: tries and interruptions before this attempt, and whether its
    cancellation was asked for."""

    tries: int
    interruptions: int
    cancelled: bool


def decide(attempt: Attempt, run: RunSpec, past: Past, *, now: float, jitter: float) -> Finish:
    """The rollout's next state after ``attempt``."""
    if attempt.outcome is RolloutState.COMPLETED:
        return Finish(attempt=attempt, target=RolloutState.COMPLETED)
    if past.cancelled:
        return Finish(attempt=_cancelled(attempt), target=RolloutState.CANCELLED)
    failure = attempt.failure or _unexplained(attempt)
    if failure.kind is FailureKind.CANCELLED:  # not asked for: the worker is going away
        failure = Failure(kind=FailureKind.INFRASTRUCTURE, code=STOPPED, message=failure.message)
    attempt = attempt.model_copy(update={"failure": failure, "outcome": RolloutState.FAILED, "reward": None})
    interrupted = failure.code in (*INTERRUPTIONS, NOT_SENT)
    counts = not interrupted or past.interruptions >= FREE_LOSSES
    tries = past.tries + counts
    if failure.retryable and tries < run.retry.max_attempts:
        retry, at_once = run.retry, interrupted and not past.interruptions
        wait_s = backoff_s(max(tries, 1), retry.backoff_s, retry.max_backoff_s, jitter=jitter)
        return Finish(
            attempt=attempt,
            target=RolloutState.QUEUED,
            not_before=0.0 if at_once or not wait_s else now + wait_s,
            counts_as_try=counts,
        )
    reward = run.reward_for(failure.kind)
    return Finish(
        attempt=attempt.model_copy(update={"reward": reward}),
        target=RolloutState.FAILED,
        counts_as_try=counts,
    )


def _cancelled(attempt: Attempt) -> Attempt:
    if attempt.outcome is RolloutState.CANCELLED:
        return attempt
    why = f" ({attempt.failure.message})" if attempt.failure else ""
    failure = Failure(kind=FailureKind.CANCELLED, code="cancelled", message=f"cancelled{why}")
    return attempt.model_copy(update={"outcome": RolloutState.CANCELLED, "failure": failure, "reward": None})


def _unexplained(attempt: Attempt) -> Failure:
    return Failure(
        kind=FailureKind.INFRASTRUCTURE,
        code="internal",
        message=f"the attempt ended as {attempt.outcome and attempt.outcome.value} without a reason",
    )
