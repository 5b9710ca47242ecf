"""Facts to put into a store under test."""

from __future__ import annotations

import pytest

from rollserve.errors import (
    FailureKind,
)
from rollserve.records.base import new_id
from rollserve.records.policy import Policy, PolicySpec
from rollserve.records.rollout import Attempt, Failure, Group, RolloutState
from rollserve.records.run import Quota, Run, RunSpec
from rollserve.records.task import GraderSpec, Task
from rollserve.store.base import Store
from rollserve.store.values import Finish, NewGroup, Start

NOW = 1_800_000_000.0
LOST = Failure(kind=FailureKind.INFRASTRUCTURE, code="sandbox_error", message="gone")


def make_policy(name: str = "pol") -> Policy:
    return Policy(spec=PolicySpec(name=name, model="tiny", tokenizer="tiny"))


def make_run(policy: str = "pol", **quota: int) -> Run:
    return Run(
        id=new_id("run"),
        spec=RunSpec(policy=policy, quota=Quota(**quota)),
        created_at=NOW,
    )


def make_group(text: str = "do it", rollouts: int = 2, key: str | None = None) -> NewGroup:
    task = Task(instruction=text, grader=GraderSpec(name="exact"), metadata={"b": 1, "a": [text]})
    return NewGroup(task=task, num_rollouts=rollouts, key=key)


async def open_run(store: Store, policy: str = "pol", **quota: int) -> Run:
    """A run (and its policy)."""
    await store.create_policy(make_policy(policy))
    run = make_run(policy, **quota)
    await store.create_run(run)
    return run


def ending(
    start: Start,
    target: RolloutState = RolloutState.COMPLETED,
    *,
    reward: float | None = None,
    failure: Failure | None = None,
    not_before: float = 0.0,
    counts_as_try: bool = True,
    payload: str | None = None,
) -> Finish:
    """The end of a started attempt."""
    attempt = Attempt(
        id=start.attempt_id,
        rollout_id=start.rollout.id,
        epoch=start.rollout.epoch,
        worker_id="w0",
        started_at=NOW,
        finished_at=NOW + 1,
        outcome=target,
        reward=reward,
        failure=failure,
        payload=payload,
    )
    return Finish(attempt=attempt, target=target, not_before=not_before, counts_as_try=counts_as_try)


async def finish_groups(store: Store, run_id: str, count: int, rollouts: int = 1) -> list[Group]:
    """Submit ``count`` groups and finish them one after the other; as they stand in the log."""
    groups = await store.submit_groups(run_id, [make_group(f"t{i}", rollouts) for i in range(count)])
    starts = await store.start_rollouts(NOW, count * rollouts)
    for start in starts:
        await store.finish_attempt(ending(start, reward=1.0))
    return [await store.get_group(group.id) for group in groups]


class NeedsStore:
    @pytest.fixture
    async def store(self) -> Store:
        raise NotImplementedError("give the suite a fixture `store` with an opened, empty store")
