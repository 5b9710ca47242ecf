"""Delivery: finished groups, with their samples, are lent to a trainer until it acks them.

The store decides what is lent (the log of finished groups, a place per trainer, leases that expire).
Here the samples are made, from the payloads, and memory stays bounded: so many answers at a time, so
many bytes an answer. A payload that can't be read costs its rollout's samples, with a note that says
so; it does not hold up the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from rollserve.errors import LeaseLost, QueueFull
from rollserve.gateway.samples import RULED, token_report
from rollserve.records.delivery import Checkpoint, Lease
from rollserve.records.rollout import GroupState, Rollout, RolloutState
from rollserve.records.run import RunSpec
from rollserve.records.sample import Sample, TokenReport
from rollserve.rollouts.bell import Bell, Bells, heard
from rollserve.rollouts.groups import Groups
from rollserve.rollouts.patience import patiently
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.runs import RunSpecs
from rollserve.rollouts.staleness import FinishedGroup, FinishedRollout, enforce, versions_beside
from rollserve.rollouts.tally import Tally
from rollserve.store.values import Page

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 128 << 20
"""Of arrays in one answer; more groups wait for the next lease. One group always goes."""
_ANSWERS_AT_ONCE = 4
_ROLLOUTS_AT_ONCE = 8
_THREADS = 2
_RELEASE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A trainer's request. ``epoch`` None takes the trainer's current one, ``ttl_s`` None the
    server's; ``max_tokens`` bounds what the groups sampled together. ``weight`` is how much larger than
    its arrays the answer will be."""

    trainer: str
    epoch: int | None = None
    max_groups: int = 16
    max_tokens: int | None = None
    wait_s: float = 0.0
    ttl_s: float | None = None
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Delivered:
    """``lease`` None: nothing finished in time. ``policy_version`` is the policy's now. ``over``: nothing
    will come any more; a code, and why."""

    lease: Lease | None
    groups: list[FinishedGroup]
    policy_version: int
    over: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How samples are made, where that is not as the run says: by which settings, from which rewards of
    calls, and whether each call is a sample of its own."""

    run: RunSpec
    call_rewards: dict[str, float] | None = None
    every_call: bool = False


class SampleMaker:
    """Payload → samples, in threads."""

    def __init__(self, ports: Ports, specs: RunSpecs, tally: Tally) -> None:
        self._store = ports.store
        self._payloads = ports.payloads
        self._build = ports.build_samples
        self._clock = ports.clock
        self._specs = specs
        self._tally = tally
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="samples")

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def make(self, rollout: Rollout, shape: Shape | None = None) -> FinishedRollout:
        """Never raises for what one rollout's data is like: the note says what was wrong with it."""
        if rollout.attempt_id is None or not _has_samples(rollout):
            return FinishedRollout(rollout=rollout)
        if shape is None:
            run, _ = await patiently(self._clock, partial(self._specs.get, rollout.run_id))
            shape = Shape(run=run)
        try:
            samples, note, tokens = await self._samples(rollout, shape)
        except Exception as error:  # a broken payload or a bug in the tree must not block the log
            log.exception("no samples of rollout %s", rollout.id)
            self._tally.add("payloads_unreadable")
            return FinishedRollout(rollout=rollout, note=f"{type(error).__name__}: {error}")
        return FinishedRollout(rollout=rollout, samples=samples, note=note, tokens=tokens)

    async def _samples(
        self, rollout: Rollout, shape: Shape
    ) -> tuple[list[Sample], str | None, TokenReport | None]:
        """With what was left out, and why."""
        # A store that is only busy must not pass for a payload that can't be read.
        asked = partial(self._store.get_attempt, rollout.attempt_id or "")
        attempt = await patiently(self._clock, asked)
        if attempt.payload is None:
            return [], "the attempt left no calls", None
        payload = await self._payloads.read(attempt.payload)
        calls, run = payload.calls, shape.run
        rewards = payload.call_rewards if shape.call_rewards is None else shape.call_rewards

        def work() -> tuple[list[Sample], TokenReport]:
            made = self._build(
                calls, rollout=rollout, run=run, call_rewards=rewards, every_call=shape.every_call
            )
            return made, token_report(calls, made, run)

        samples, tokens = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        return samples, _left_out(samples, tokens), tokens


def _left_out(samples: Sequence[Sample], tokens: TokenReport) -> str | None:
    """Sampled tokens that are not trained, with the reasons; those that the run leaves out by its own rule
    only where nothing else is there."""
    left = {
        name: count
        for name, count in sorted(tokens.left_out.items())
        if not samples or not name.startswith(RULED)
    }
    if not left:
        return None if samples else "it made no model call"
    reasons = ", ".join(f"{name} {count}" for name, count in left.items())
    return f"{sum(left.values())} of {tokens.sampled} sampled tokens are not trained: {reasons}"


def _has_samples(rollout: Rollout) -> bool:
    """Failed rollouts train nothing, unless the run gives their failure a reward."""
    return rollout.state is RolloutState.COMPLETED or rollout.reward is not None


class Deliveries:
    """``finished`` is rung by run when a group of it has finished, ``freed`` when work may start that could
    not before. ``close``: the server stops; waiting requests are answered at once."""

    def __init__(
        self,
        ports: Ports,
        specs: RunSpecs,
        groups: Groups,
        policies: Policies,
        maker: SampleMaker,
        tally: Tally,
        *,
        finished: Bells,
        freed: Bell,
        happened: Bell,
    ) -> None:
        self._store = ports.store
        self._clock = ports.clock
        self._settings = ports.settings.delivery
        self._most_waiting = ports.settings.api.max_waiting_leases
        self._specs = specs
        self._groups = groups
        self._policies = policies
        self._maker = maker
        self._tally = tally
        self._finished = finished
        self._freed = freed
        self._happened = happened
        self._answers = asyncio.Semaphore(_ANSWERS_AT_ONCE)
        self._waiting = 0
        self._closing = False

    @property
    def waiting(self) -> int:
        return self._waiting

    def close(self) -> None:
        self._closing = True
        self._finished.ring_all()

    async def lease(self, run_id: str, wanted: Wanted) -> Delivered:
        """Up to ``max_groups`` finished groups, waiting up to ``wait_s`` for the first. Cancelling
        gives back what was leased. Raises ``NotFound``, ``StaleEpoch``, ``QueueFull``."""
        spec, _ = await self._specs.get(run_id)
        until = asyncio.get_running_loop().time() + min(wanted.wait_s, self._settings.max_wait_s)
        while True:
            lease, over = await self._wait(run_id, wanted, until)
            if lease is None:
                version = (await self._policies.get(spec.policy)).version
                return Delivered(lease=None, groups=[], policy_version=version, over=over)
            delivered = await self._fill(lease, wanted, spec)
            if delivered.groups:
                return delivered

    async def fill(self, lease: Lease) -> Delivered:
        """What a lease that somebody took holds, by the run's rules; its ``lease`` is None where all of it is
        too old. Raises what reading it raises, and gives the lease back then."""
        spec, _ = await self._specs.get(lease.run_id)
        return await self._fill(lease, Wanted(trainer=lease.trainer), spec)

    async def _wait(
        self, run_id: str, wanted: Wanted, until: float
    ) -> tuple[Lease | None, tuple[str, str] | None]:
        """A lease; or none, and why none will come."""
        if self._waiting >= self._most_waiting:
            raise QueueFull(f"{self._most_waiting} trainers are waiting already", retry_after_s=1.0)
        self._waiting += 1
        try:
            while True:
                rung = self._finished.listen(run_id)
                lease = await self._next(run_id, wanted, wanted.max_groups)
                left_s = until - asyncio.get_running_loop().time()
                if lease is not None:
                    return lease, None
                over = await self._store.run_over(run_id, wanted.trainer)
                if over is not None or left_s <= 0 or self._closing:
                    return None, over
                await heard(rung, left_s)
        finally:
            self._waiting -= 1

    async def _next(self, run_id: str, wanted: Wanted, limit: int) -> Lease | None:
        taking = asyncio.ensure_future(
            self._store.lease_groups(
                run_id,
                wanted.trainer,
                wanted.epoch,
                limit=limit,
                max_tokens=wanted.max_tokens,
                ttl_s=wanted.ttl_s or self._settings.lease_ttl_s,
                now=self._clock.now(),
            )
        )
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:  # it may be committed already, and nobody would know of it
            lease = await taking
            if lease is not None:
                await self._give_back(lease.id)
            raise

    async def _fill(self, lease: Lease, wanted: Wanted, spec: RunSpec) -> Delivered:
        """Make the samples of as many of the leased groups as fit; the others are given back. What is too
        old for the run is dealt with here, by the policy's version now."""
        held: Lease | None = lease
        try:
            async with self._answers:
                version = (await self._policies.get(spec.policy)).version
                groups = await self._assemble(lease, wanted.weight)
                if len(groups) < len(lease.group_ids):
                    held = None
                    await self._store.nack_lease(lease.id)
                    held = await self._next(lease.run_id, wanted, len(groups))
                    made = {group.group.id: group for group in groups}
                    missing = [] if held is None else [g for g in held.group_ids if g not in made]
                    made |= {group_id: await self._group(group_id) for group_id in missing}
                    groups = [] if held is None else [made[group_id] for group_id in held.group_ids]
                if held is not None:
                    held, groups = await self._enforce(held, groups, spec, version)
        except BaseException:
            if held is not None:
                await self._give_back(held.id)
            raise
        self._tally.add("groups_delivered", len(groups))
        self._tally.add("rollouts_delivered", sum(len(group.rollouts) for group in groups))
        self._tally.add(
            "samples_delivered", sum(len(rollout.samples) for group in groups for rollout in group.rollouts)
        )
        self._happened.ring()
        return Delivered(lease=held, groups=groups, policy_version=version)

    async def _enforce(
        self, lease: Lease, groups: list[FinishedGroup], spec: RunSpec, version: int
    ) -> tuple[Lease | None, list[FinishedGroup]]:
        others = await versions_beside(spec, self._store.get_policy)
        checked = enforce(groups, spec.staleness, version, others)
        await self._store.note_lease(lease.id, checked.handed, checked.withheld)
        if checked.withheld:
            self._tally.add("groups_withheld", len(checked.withheld))
            self._freed.ring()
        if not checked.groups:
            return None, []
        left = [group.group.id for group in checked.groups]
        return lease.model_copy(update={"group_ids": left}), checked.groups

    async def _assemble(self, lease: Lease, weight: float) -> list[FinishedGroup]:
        groups: list[FinishedGroup] = []
        size_bytes = 0.0
        for group_id in lease.group_ids:
            group = await self._group(group_id)
            size_bytes += group.size_bytes * weight
            if groups and size_bytes > MAX_ANSWER_BYTES:
                break
            groups.append(group)
        return groups

    async def _group(self, group_id: str) -> FinishedGroup:
        group, rollouts = await self._groups.get(group_id), await self._groups.rollouts_of(group_id)
        if group.state is GroupState.FAILED:
            note = f"its group has {group.usable} usable rollouts, of at least {group.rule.min_usable}"
            return FinishedGroup(
                group=group, rollouts=[FinishedRollout(rollout=each, note=note) for each in rollouts]
            )
        places = asyncio.Semaphore(_ROLLOUTS_AT_ONCE)

        async def make(rollout: Rollout) -> FinishedRollout:
            async with places:
                return await self._maker.make(rollout)

        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(make(rollout)) for rollout in rollouts]
        return FinishedGroup(group=group, rollouts=[task.result() for task in made])

    async def _give_back(self, lease_id: str) -> None:
        """The answer reached nobody. Kept short and shielded: the caller is being cancelled."""
        try:
            async with asyncio.timeout(_RELEASE_S):
                await asyncio.shield(self.nack(lease_id))
        except (TimeoutError, LeaseLost):
            log.warning("lease %s is given back when it expires", lease_id)

    # -- leases
    async def renew(self, lease_id: str, ttl_s: float | None = None) -> Lease:
        ttl_s = ttl_s or self._settings.lease_ttl_s
        return await self._store.renew_lease(lease_id, ttl_s=ttl_s, now=self._clock.now())

    async def ack(self, lease_id: str) -> Lease:
        """Raises ``LeaseLost`` for a lease that never was, has expired, or is fenced."""
        lease = await self._store.ack_lease(lease_id, now=self._clock.now())
        self._finished.ring(lease.run_id)  # it may have been the last
        self._freed.ring()
        self._happened.ring()
        return lease

    async def nack(self, lease_id: str) -> None:
        await self._store.nack_lease(lease_id)
        self._finished.ring_all()
        self._happened.ring()

    async def expire(self) -> int:
        """Give back expired leases."""
        expired = await self._store.expire_leases(self._clock.now())
        if expired:
            self._tally.add("leases_expired", expired)
            self._finished.ring_all()
            self._happened.ring()
        return expired

    # -- checkpoints
    async def commit(
        self, run_id: str, trainer: str, epoch: int, *, name: str, cursor: str | None
    ) -> Checkpoint:
        await self._specs.get(run_id)
        checkpoint = await self._store.commit_checkpoint(
            run_id, trainer, epoch, name=name, cursor=cursor, now=self._clock.now()
        )
        self._tally.add("checkpoints")
        self._happened.ring()
        return checkpoint

    async def epoch(self, run_id: str, trainer: str) -> int:
        return await self._store.trainer_epoch(run_id, trainer)

    async def rewind(self, run_id: str, trainer: str, name: str | None) -> tuple[int, int, Checkpoint | None]:
        """The trainer's new epoch, the version its policy is back at, and the checkpoint."""
        spec, _ = await self._specs.get(run_id)
        epoch, checkpoint = await self._store.rewind(run_id, trainer, name, now=self._clock.now())
        policy = await self._policies.tell(spec.policy)
        self._tally.add("rewinds")
        self._finished.ring(run_id)
        return epoch, policy.version, checkpoint

    async def checkpoints(
        self, run_id: str, trainer: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Checkpoint]:
        return await self._store.list_checkpoints(run_id, trainer, cursor=cursor, limit=limit)
