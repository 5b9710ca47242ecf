"""Export: the samples of a run's groups, made anew from their payloads by other settings. No model is run,
and nothing that was delivered changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollserve.gateway.samples import is_cause
from rollserve.records.export import ExportSettings
from rollserve.records.regrade import Regrading
from rollserve.records.rollout import Group, GroupState, Rollout
from rollserve.records.run import RunSpec
from rollserve.rollouts.delivery import MAX_ANSWER_BYTES, SampleMaker, Shape
from rollserve.rollouts.groups import Groups
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.staleness import FinishedGroup, FinishedRollout, enforce, versions_beside

_STATES = (GroupState.FINISHED, GroupState.FILTERED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Exported:
    """``left_out`` is why all of the group is (then it has no rollouts)."""

    finished: FinishedGroup
    left_out: str | None = None


class Exports:
    def __init__(self, ports: Ports, groups: Groups, maker: SampleMaker) -> None:
        self._store = ports.store
        self._groups = groups
        self._maker = maker

    async def page(
        self, run_id: str, settings: ExportSettings, *, cursor: str | None, limit: int, weight: float
    ) -> tuple[list[Exported], str | None]:
        """Groups in the order of their submission, and the cursor of the next page: at most ``limit`` are
        looked at, fewer where their arrays are large. Those that are open, failed or cancelled are passed
        over. Raises ``NotFound``."""
        run = await self._store.get_run(run_id)
        version = settings.version
        if version is None:
            version = (await self._store.get_policy(run.spec.policy)).version
        if settings.regrade is not None:
            await self._store.get_regrade(settings.regrade)
        found: list[Exported] = []
        size_bytes = 0.0
        for _ in range(limit):
            groups = await self._store.list_groups(run_id, cursor=cursor, limit=1)
            for group in groups.items:
                if group.state in _STATES:
                    found.append(await self._group(group, run.spec, settings, version))
                    size_bytes += found[-1].finished.size_bytes * weight
            cursor = groups.next
            if cursor is None or size_bytes > MAX_ANSWER_BYTES:
                break
        return found, cursor

    async def _group(self, group: Group, run: RunSpec, settings: ExportSettings, version: int) -> Exported:
        rollouts = await self._groups.rollouts_of(group.id)
        regraded: dict[str, Regrading] = {}
        if settings.regrade is not None:
            regraded = await self._store.regradings_of(settings.regrade, [each.id for each in rollouts])
        spec = _spec(run, settings)
        made = [await self._rollout(each, spec, settings, regraded) for each in rollouts]
        finished = FinishedGroup(group=group, rollouts=made)
        if settings.staleness is None:
            return Exported(finished=finished)
        others = await versions_beside(run, self._store.get_policy)
        checked = enforce([finished], settings.staleness, version, others)
        if checked.withheld:
            most = settings.staleness.max_staleness
            why = f"too old: at version {version} a rollout of it is more than {most} versions behind"
            return Exported(finished=FinishedGroup(group=group, rollouts=[]), left_out=why)
        return Exported(finished=checked.groups[0])

    async def _rollout(
        self, rollout: Rollout, run: RunSpec, settings: ExportSettings, regraded: Mapping[str, Regrading]
    ) -> FinishedRollout:
        shape = Shape(run=run, every_call=settings.sequences == "calls")
        if settings.regrade is not None:
            regrading = regraded.get(rollout.id)
            if regrading is None or regrading.graded is None or regrading.reward is None:
                return FinishedRollout(
                    rollout=rollout.model_copy(update={"reward": None}), note=_not_graded(regrading)
                )
            rollout = rollout.model_copy(
                update={"reward": regrading.reward, "attempt_id": regrading.attempt_id}
            )
            shape = replace(shape, call_rewards=regrading.graded.call_rewards)
        made = await self._maker.make(rollout, shape)
        causes = [name for name in (made.tokens.left_out if made.tokens else ()) if is_cause(name)]
        if run.on_inexact == "fail" and causes:
            return replace(made, samples=[], note=f"it is not token-exact: {', '.join(sorted(causes))}")
        return made


def _spec(run: RunSpec, settings: ExportSettings) -> RunSpec:
    asked = {"train_labels": settings.train_labels, "on_inexact": settings.on_inexact}
    return run.model_copy(update={name: value for name, value in asked.items() if value is not None})


def _not_graded(regrading: Regrading | None) -> str:
    if regrading is None:
        return "the regrade does not have it: it had not ended, or left nothing to grade"
    graded = regrading.graded
    why = None if graded is None else graded.note or (graded.failure and graded.failure.message)
    return f"its grading is {regrading.state.value}" + (f": {why}" if why else "")
