"""Whether backends serve the weights that they claim: all are asked for the same logprobs, and who differs is
fenced off."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Set as AnySet

from rollserve.errors import Conflict
from rollserve.records.policy import Backend, BackendState, Policy
from rollserve.records.update import WeightUpdate
from rollserve.rollouts.canary import Judgement, canary_ids, judge, judge_restored, score_all
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.ports import Ports

log = logging.getLogger(__name__)


class Fencing:
    def __init__(self, ports: Ports, policies: Policies) -> None:
        self._ports = ports
        self._store = ports.store
        self._clock = ports.clock
        self._policies = policies

    async def judge(self, policy: Policy, version: int, figures: list[float] | None) -> Judgement | None:
        """None without canary. Raises ``Conflict`` where only figures could tell who is right."""
        settings = self._ports.settings.backends
        if not settings.canary:
            return None
        scores = await self._scores(policy)
        before = policy.canary
        judgement = judge(
            version,
            scores,
            figures=figures,
            previous=before if before is not None and before.version != version else None,
            tolerance=settings.canary_tolerance,
            at=self._clock.now(),
        )
        if judgement.undecided and policy.update is not None and policy.update.open:
            raise Conflict(judgement.canary.detail, field="canary")
        return judgement

    async def restored(self, update: WeightUpdate) -> Judgement | None:
        settings = self._ports.settings.backends
        policy = await self._store.get_policy(update.policy)
        if not settings.canary or policy.canary is None or policy.canary.version != policy.version:
            return None
        scores = await self._scores(policy)
        return judge_restored(
            policy.canary, scores, tolerance=settings.canary_tolerance, at=self._clock.now()
        )

    async def _scores(self, policy: Policy) -> dict[str, list[float] | str]:
        backends = [
            backend
            for backend in await self._policies.registered(policy.spec.name)
            if backend.state in (BackendState.ACTIVE, BackendState.FENCED)
        ]
        ids = fitting_ids(backends)
        return dict(await score_all(backends, policy.spec.model, ids, self._ports.open_backend))

    async def fence(
        self,
        name: str,
        judgement: Judgement | None,
        *,
        absent: AnySet[str] = frozenset(),
        of: WeightUpdate | None = None,
    ) -> None:
        """Fence off backends that serve other weights, or were away during the update and did not prove
        theirs; let those back that have proved them."""
        wrong = dict(judgement.wrong) if judgement is not None else {}
        right = judgement.right if judgement is not None else set()
        for backend in await self._policies.registered(name):
            away = of is not None and (backend.id in absent or backend.state is BackendState.FAILED)
            if away and backend.id not in right:
                wrong.setdefault(backend.id, "it was away while the weights were updated")
            if backend.id in wrong:
                log.error("backend %s of %s is fenced off: %s", backend.id, name, wrong[backend.id])
                await self._policies.fence(backend.id, wrong[backend.id])
            elif backend.id in right and backend.state is BackendState.FENCED:
                await self._policies.fence(backend.id, None)


def fitting_ids(backends: Sequence[Backend]) -> list[int]:
    """That fit the shortest context."""
    contexts = [b.info.context_tokens for b in backends if b.info.context_tokens is not None]
    return canary_ids(min(contexts, default=None))
