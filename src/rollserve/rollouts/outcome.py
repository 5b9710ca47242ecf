"""What becomes of an attempt: gathered while it runs, and written down as one record at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rollserve.agent.base import Agent, AgentResult
from rollserve.errors import AttemptCancelled, EpisodeFailure
from rollserve.executor.base import StartAttempt
from rollserve.gateway.base import Session
from rollserve.grader.base import Grade, Grader
from rollserve.records.rollout import Attempt, Failure, RolloutState
from rollserve.rollouts.failures import failure_of, plain_json
from rollserve.sandbox.base import Sandbox
from rollserve.store.payload import SealedPayload

ANSWER_CHARS = 4000
"""Of an answer, in the attempt's record; its payload has all of it."""


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Who plays: made in init, used by the stages after it."""

    agent: Agent
    grader: Grader
    sandbox: Sandbox
    fork: Callable[[str], Awaitable[Sandbox]]
    session: Session


@dataclass(kw_only=True)
class Outcome:
    """``grade`` and ``failure`` exclude each other once the attempt has ended; ``troubles`` are
    releases that failed; ``judged_in`` is the grader's session."""

    start: StartAttempt
    worker_id: str
    started_at: float
    result: AgentResult = field(default_factory=AgentResult)
    grade: Grade | None = None
    failure: EpisodeFailure | None = None
    session: Session | None = None
    judged_in: Session | None = None
    payload: SealedPayload | None = None
    kept_sandbox: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)


def finished(outcome: Outcome, now: float, detail_bytes: int) -> Attempt:
    """The record of an attempt that has ended."""
    start, failure, payload = outcome.start, outcome.failure, outcome.payload
    graded = outcome.grade if failure is None else None
    return Attempt(
        id=start.attempt_id,
        rollout_id=start.rollout_id,
        epoch=start.epoch,
        worker_id=outcome.worker_id,
        started_at=outcome.started_at,
        finished_at=now,
        outcome=_state(failure),
        failure=None if failure is None else failure_of(failure),
        reward=None if graded is None else float(graded.reward),
        truncated_by=outcome.result.truncated_by,
        timings=outcome.timings,
        counts=_counts(outcome.session, outcome.judged_in),
        code=outcome.code,
        detail=_detail(outcome, detail_bytes),
        payload=None if payload is None else payload.ref,
        payload_bytes=0 if payload is None else payload.size_bytes,
    )


def never_started(start: StartAttempt, worker_id: str, now: float, failure: Failure) -> Attempt:
    """The record of an attempt that could not even be begun."""
    return Attempt(
        id=start.attempt_id,
        rollout_id=start.rollout_id,
        epoch=start.epoch,
        worker_id=worker_id,
        started_at=now,
        finished_at=now,
        outcome=RolloutState.FAILED,
        failure=failure,
    )


def _counts(*sessions: Session | None) -> dict[str, int]:
    """Of all calls, a grader's too: what they sampled is the attempt's."""
    total = Counter[str]()
    for session in filter(None, sessions):
        total.update(session.counts)
    return dict(total)


def _state(failure: EpisodeFailure | None) -> RolloutState:
    if failure is None:
        return RolloutState.COMPLETED
    return RolloutState.CANCELLED if isinstance(failure, AttemptCancelled) else RolloutState.FAILED


def _detail(outcome: Outcome, limit_bytes: int) -> dict[str, Any]:
    detail: dict[str, Any] = {}
    if outcome.result.answer is not None:
        detail["answer"] = outcome.result.answer[:ANSWER_CHARS]
    if outcome.result.detail:
        detail["agent"] = plain_json(outcome.result.detail, limit_bytes)
    if outcome.grade is not None and outcome.grade.detail:
        detail["grader"] = plain_json(outcome.grade.detail, limit_bytes)
    if outcome.kept_sandbox is not None:
        detail["kept_sandbox"] = outcome.kept_sandbox
    if outcome.troubles:
        detail["release_errors"] = outcome.troubles
    return detail
