"""Which finished groups are worth training: asked once, between a group's last rollout and the log.

A group that waits to be judged is in the store as such, so a death in between costs nothing. A filter
that raises keeps the group, with a note: what can't be judged is not thrown away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rollserve.errors import NotFound, RollserveError
from rollserve.records.control import FilterRule
from rollserve.records.rollout import Group
from rollserve.rollouts.bell import Bell, heard
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.runs import RunSpecs
from rollserve.rollouts.stops import GroupEnds
from rollserve.rollouts.tally import Tally

log = logging.getLogger(__name__)

_AT_ONCE = 8
_LOOK_S = 5.0
_RETRY_S = 1.0
_NOTE_CHARS = 2000


def left_out_by(rule: FilterRule, rewards: Sequence[float]) -> bool:
    """Whether a rule of our own leaves a group with these rewards (one at least) out."""
    mean = sum(rewards) / len(rewards)
    if rule.name == "zero_variance":
        return max(rewards) - min(rewards) <= (rule.threshold or 0.0)
    if rule.name == "too_hard":
        return mean <= (0.0 if rule.threshold is None else rule.threshold)
    if rule.name == "too_easy":
        return mean >= (1.0 if rule.threshold is None else rule.threshold)
    raise ValueError(f"no filter {rule.name!r}")


class Judge:
    """``judging`` is rung when a group waits to be judged."""

    def __init__(
        self, ports: Ports, specs: RunSpecs, ends: GroupEnds, tally: Tally, *, judging: Bell
    ) -> None:
        self._store = ports.store
        self._keeps = ports.keeps
        self._clock = ports.clock
        self._specs = specs
        self._ends = ends
        self._tally = tally
        self._judging = judging
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            rung = self._judging.listen()
            try:
                waiting = await self._store.list_judging()
                async with asyncio.TaskGroup() as tasks:
                    for group, rewards in waiting:
                        tasks.create_task(self._judge(group, rewards))
            except Exception:
                log.exception("groups could not be judged; again in %g s", _RETRY_S)
                self._tally.add("store_errors")
                await self._clock.sleep(_RETRY_S)
                continue
            if not waiting:
                await heard(rung, _LOOK_S)

    async def _judge(self, group: Group, rewards: list[float]) -> None:
        async with self._places:
            try:
                spec, _ = await self._specs.get(group.run_id)
            except NotFound:  # pruned
                return
            filtered_by, notes = None, list[str]()
            for rule in spec.filters:
                try:
                    if await self._leaves_out(rule, group, rewards):
                        filtered_by = rule.name
                        break
                except Exception as error:  # an edge: user code may raise anything
                    told = error.message if isinstance(error, RollserveError) else str(error)
                    notes.append(f"filter {rule.name} raised {type(error).__name__}: {told}"[:_NOTE_CHARS])
            note = "; ".join(notes) or None
            judged = await self._store.judge_group(group.id, filtered_by=filtered_by, note=note)
            self._ends.tell(judged, group.run_id)
        self._tally.add("groups_filtered" if filtered_by else "groups_kept")
        self._tally.add("filter_errors", len(notes))

    async def _leaves_out(self, rule: FilterRule, group: Group, rewards: list[float]) -> bool:
        if ":" not in rule.name:
            return left_out_by(rule, rewards)
        arguments = {
            "rewards": rewards,
            "task": group.task.model_dump(mode="json"),
            "options": dict(rule.options),
        }
        return not await self._keeps(rule.name, arguments)
