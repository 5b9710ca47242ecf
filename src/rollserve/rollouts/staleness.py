"""How old the samples of a delivery are, and what the run's rule makes of it. Pure.

Staleness of a rollout is the policy's version at the hand-over less that of its oldest trained token:
what it waited in queues counts, since the version moved on meanwhile. Tokens of a route that is trained
are as old as they are by its own policy's version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from rollserve.records.control import StalenessRule
from rollserve.records.policy import Policy
from rollserve.records.rollout import Group, Rollout
from rollserve.records.run import RunSpec
from rollserve.records.sample import Sample, TokenReport
from rollserve.store.values import Handed

TOO_OLD = "too_old"
"""Among the reasons why sampled tokens are not trained."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedRollout:
    """``note`` says why there are no samples of a rollout that should have some, or what of them is not
    trained; ``tokens`` what became of those that were sampled. ``staleness`` is None where nothing of it
    is trained; ``stale``: more than the run's bound."""

    rollout: Rollout
    samples: list[Sample] = field(default_factory=list)
    note: str | None = None
    tokens: TokenReport | None = None
    staleness: int | None = None
    stale: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(_size_bytes(sample) for sample in self.samples)


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedGroup:
    group: Group
    rollouts: list[FinishedRollout]

    @property
    def size_bytes(self) -> int:
        return sum(rollout.size_bytes for rollout in self.rollouts)


def _size_bytes(sample: Sample) -> int:
    arrays = (sample.ids, sample.loss_mask, sample.logprobs, sample.versions, sample.rewards)
    extras = sum(array.nbytes for array in sample.extras.values())
    return extras + sum(array.nbytes for array in arrays) + len(sample.text or "")


@dataclass(frozen=True, kw_only=True, eq=False)
class Checked:
    """``groups`` to hand over; ``withheld`` are the ids of those that are not; ``handed`` of all."""

    groups: list[FinishedGroup]
    withheld: list[str]
    handed: list[Handed]


async def versions_beside(run: RunSpec, get: Callable[[str], Awaitable[Policy]]) -> dict[str, int]:
    """Of the policies that are trained beside the run's own, by name."""
    names = {route.policy for route in run.routes.values() if route.train} - {run.policy}
    return {name: (await get(name)).version for name in sorted(names)}


def enforce(
    groups: Sequence[FinishedGroup],
    rule: StalenessRule,
    version: int,
    others: Mapping[str, int] | None = None,
) -> Checked:
    """``version`` is the run's own policy's now; ``others`` are those of other policies that are trained."""
    now = {**(others or {}), "": version}
    kept: list[FinishedGroup] = []
    withheld: list[str] = []
    handed: list[Handed] = []
    for group in groups:
        aged = [_aged(rollout, rule, now) for rollout in group.rollouts]
        if rule.on_stale == "withhold" and any(rollout.stale for rollout in aged):
            withheld.append(group.group.id)
            handed += [_handed(each, dropped=True) for each in aged if each.samples]
            continue
        done = [_enforced(rollout, rule, now) for rollout in aged]
        kept.append(replace(group, rollouts=[rollout for rollout, _ in done]))
        handed += [each for _, each in done if each is not None]
    return Checked(groups=kept, withheld=withheld, handed=handed)


def _aged(rollout: FinishedRollout, rule: StalenessRule, now: Mapping[str, int]) -> FinishedRollout:
    behind = [
        now[sample.policy] - sample.oldest_version
        for sample in rollout.samples
        if sample.oldest_version is not None
    ]
    if not behind:
        return rollout
    staleness = max(0, *behind)
    bound = rule.max_staleness
    return replace(rollout, staleness=staleness, stale=bound is not None and staleness > bound)


def _enforced(
    rollout: FinishedRollout, rule: StalenessRule, now: Mapping[str, int]
) -> tuple[FinishedRollout, Handed | None]:
    if not rollout.stale:
        return rollout, _handed(rollout) if rollout.rollout.attempt_id else None
    if rule.on_stale == "drop":
        note = f"too old: {rollout.staleness} versions behind, of at most {rule.max_staleness}"
        tokens = _too_old(rollout.tokens, _trained(rollout.samples))
        return replace(rollout, samples=[], note=note, tokens=tokens), _handed(rollout, dropped=True)
    if rule.on_stale == "mask":
        most = rule.max_staleness or 0
        samples = [
            replace(s, loss_mask=s.loss_mask & (s.versions >= now[s.policy] - most)) for s in rollout.samples
        ]
        masked = _trained(rollout.samples) - _trained(samples)
        done = replace(rollout, samples=samples, tokens=_too_old(rollout.tokens, masked))
        return done, _handed(done, masked)
    return rollout, _handed(rollout)


def _too_old(tokens: TokenReport | None, count: int) -> TokenReport | None:
    if tokens is None or not count:
        return tokens
    left_out = tokens.left_out | {TOO_OLD: tokens.left_out.get(TOO_OLD, 0) + count}
    return msgspec.structs.replace(tokens, trained=tokens.trained - count, left_out=left_out)


def _trained(samples: Sequence[Sample]) -> int:
    return sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples)


def _handed(rollout: FinishedRollout, masked: int = 0, *, dropped: bool = False) -> Handed:
    return Handed(
        attempt_id=rollout.rollout.attempt_id or "",
        staleness=rollout.staleness,
        dropped=dropped,
        trained=_trained(rollout.samples),
        masked=masked,
    )
