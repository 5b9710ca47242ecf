"""Groups: checked as a whole, then stored as a whole; and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from rollserve.errors import InvalidInput
from rollserve.records.control import GroupRule
from rollserve.records.rollout import Attempt, Group, Rollout, RolloutState
from rollserve.records.run import RunSpec
from rollserve.records.task import Task
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.cancel import Cancelled, Canceller
from rollserve.rollouts.control import check_rule
from rollserve.rollouts.pages import every
from rollserve.rollouts.pictures import Sight
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.routes import check_routes
from rollserve.rollouts.runs import RunSpecs, checked_key
from rollserve.rollouts.tally import Tally
from rollserve.rollouts.templates import Templates
from rollserve.store.values import NewGroup, Page

_CHECKS_PER_TURN = 16
"""Tasks checked before other work of the event loop gets its turn."""


class GroupRequest(Protocol):
    """What is asked for: one task, so many times."""

    @property
    def task(self) -> Task: ...
    @property
    def num_rollouts(self) -> int: ...
    @property
    def rule(self) -> GroupRule | None:
        """None: the run's."""


class Groups:
    """``queued`` is rung when there is more to start; ``happened`` on any event."""

    def __init__(
        self,
        ports: Ports,
        specs: RunSpecs,
        canceller: Canceller,
        tally: Tally,
        templates: Templates,
        *,
        queued: Bell,
        happened: Bell,
    ) -> None:
        self._store = ports.store
        self._check_task = ports.check_task
        self._limits = ports.settings.api
        self._specs = specs
        self._canceller = canceller
        self._tally = tally
        self._templates = templates
        self._queued = queued
        self._happened = happened

    async def check(self, groups: Sequence[GroupRequest], spec: RunSpec | None = None) -> None:
        """Raises ``InvalidInput`` for the first thing that can't be run; nothing is started. Without
        ``spec`` what a run's settings say is left open."""
        most = self._limits.max_groups_per_request
        if not 0 < len(groups) <= most:
            raise InvalidInput(f"1 to {most} groups in one request, not {len(groups)}", field="groups")
        for index, group in enumerate(groups):
            where = f"groups.{index}"
            if not 0 < group.num_rollouts <= self._limits.max_rollouts_per_group:
                raise InvalidInput(
                    f"1 to {self._limits.max_rollouts_per_group}, not {group.num_rollouts}",
                    field=f"{where}.num_rollouts",
                )
            rule = group.rule or (spec.groups if spec else GroupRule())
            check_rule(
                rule,
                spec or RunSpec(policy="any"),
                num_rollouts=group.num_rollouts,
                most_rollouts=self._limits.max_rollouts_per_group,
                field=f"{where}.rule",
            )
            await self._check_task(group.task, f"{where}.task")
            if index % _CHECKS_PER_TURN == _CHECKS_PER_TURN - 1:
                await asyncio.sleep(0)

    async def submit(
        self, run_id: str, groups: Sequence[GroupRequest], key: str | None = None
    ) -> list[Group]:
        """All or none; durable when this returns. With ``key`` the same groups come back when the
        request is sent again. Raises ``InvalidInput``, ``NotFound``, ``Conflict``, ``QueueFull``."""
        key = checked_key(key)
        spec, _ = await self._specs.get(run_id)
        own = await self._templates.check(spec.policy, "run.policy")
        await check_routes(spec, own, self._templates.check, "run.routes")
        await self.check(groups, spec)
        sight = Sight(spec.policy, self._store)
        for index, group in enumerate(groups):
            await sight.check(group.task, f"groups.{index}.task")
        new = [
            NewGroup(
                task=group.task,
                num_rollouts=group.num_rollouts,
                key=None if key is None else f"{key}/{index}",
                request_size=len(groups),
                rule=group.rule or spec.groups,
            )
            for index, group in enumerate(groups)
        ]
        stored = await self._store.submit_groups(run_id, new)
        self._tally.add("groups_submitted", len(stored))
        self._queued.ring()
        self._happened.ring()
        return stored

    async def get(self, group_id: str) -> Group:
        return await self._store.get_group(group_id)

    async def counts(self, group_id: str) -> dict[str, int]:
        """Its rollouts by state."""
        return await self._store.group_counts(group_id)

    async def rollouts_of(self, group_id: str) -> list[Rollout]:
        """All of a group's rollouts, by index; ``api.max_rollouts_per_group`` bounds them."""
        rollouts = await every(partial(self._store.list_rollouts, group_id=group_id))
        return sorted(rollouts, key=lambda rollout: rollout.index)

    async def of_run(self, run_id: str, *, state: str | None, cursor: str | None, limit: int) -> Page[Group]:
        return await self._store.list_groups(run_id, state=state, cursor=cursor, limit=limit)

    async def rollouts(
        self,
        *,
        run_id: str | None,
        group_id: str | None,
        state: RolloutState | None,
        cursor: str | None,
        limit: int,
    ) -> Page[Rollout]:
        """Raises ``NotFound`` for a run or group that is not there: no page of none."""
        if run_id is not None:
            await self._store.get_run(run_id)
        if group_id is not None:
            await self._store.get_group(group_id)
        return await self._store.list_rollouts(
            run_id=run_id, group_id=group_id, state=state, cursor=cursor, limit=limit
        )

    async def rollout(self, rollout_id: str) -> tuple[Rollout, Task, Attempt | None]:
        """With its task and its newest attempt."""
        rollout = await self._store.get_rollout(rollout_id)
        group = await self._store.get_group(rollout.group_id)
        return rollout, group.task, await self._store.last_attempt(rollout_id)

    async def attempts(
        self, rollout_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Attempt]:
        return await self._store.list_attempts(rollout_id, cursor=cursor, limit=limit)

    async def cancel_group(self, group_id: str) -> Cancelled:
        await self._store.get_group(group_id)
        return await self._canceller.cancel(group_id=group_id)

    async def cancel_rollout(self, rollout_id: str) -> Cancelled:
        await self._store.get_rollout(rollout_id)
        return await self._canceller.cancel(rollout_id=rollout_id)
