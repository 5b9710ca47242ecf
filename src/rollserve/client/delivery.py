"""Finished groups as a trainer sees them, and the loop that leases, renews and acks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import msgspec

from rollserve.client.http import RemoteError, Transport, part
from rollserve.errors import LeaseLost, QueueFull, RollserveError, StaleEpoch, Unavailable
from rollserve.records.export import ExportSettings
from rollserve.records.rollout import Group, Rollout, Stop
from rollserve.records.sample import Sample, TokenReport
from rollserve.wire import (
    DeliveredRollout,
    Delivery,
    ExportGroups,
    ExportPage,
    LeaseGroups,
    TrainerStatus,
    from_wire,
    parse_lease,
)

PATIENCE_S = 60.0
"""How long a stream of groups waits for a server that does not answer."""


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """A rollout that has ended, with its samples (none where it failed before the model spoke).
    ``note`` says why one that should have samples has none, or what of them is not trained; ``tokens``
    what became of those that were sampled. ``staleness``: versions between its oldest trained token and
    the policy's at the hand-over; ``stale``: more than the run's bound."""

    rollout: Rollout
    samples: list[Sample]
    note: str | None = None
    tokens: TokenReport | None = None
    staleness: int | None = None
    stale: bool = False

    @property
    def reward(self) -> float | None:
        return self.rollout.reward


@dataclass(slots=True)
class FinishedGroup:
    """A finished group, leased. Ack it once its samples are safe with the trainer."""

    group: Group
    rollouts: list[FinishedRollout]
    lease_id: str
    epoch: int
    policy_version: int
    _transport: Transport = field(repr=False)
    _settled: bool = False

    @property
    def samples(self) -> list[Sample]:
        return [sample for rollout in self.rollouts for sample in rollout.samples]

    @property
    def rewards(self) -> list[float | None]:
        """One entry a rollout; None where it was not graded."""
        return [rollout.reward for rollout in self.rollouts]

    @property
    def missing(self) -> dict[int, str]:
        """Why a rollout is not usable, by its index; those that were only spare are not missing."""
        return {
            rollout.rollout.index: _reason(rollout.rollout)
            for rollout in self.rollouts
            if rollout.reward is None and not _spare(rollout.rollout)
        }

    @property
    def settled(self) -> bool:
        return self._settled

    async def ack(self) -> None:
        """Ours now: not delivered again unless rewound. Idempotent. Raises ``LeaseLost``,
        ``StaleEpoch`` when another trainer took over."""
        if not self._settled:
            await self._transport.request("POST", f"/v1/deliveries/{part(self.lease_id)}/ack")
            self._settled = True

    async def nack(self) -> None:
        """Give it back: it is delivered again at once. Idempotent."""
        if not self._settled:
            await self._transport.request("POST", f"/v1/deliveries/{part(self.lease_id)}/nack")
            self._settled = True

    async def renew(self, ttl_s: float | None = None) -> None:
        await self._transport.request("POST", f"/v1/deliveries/{part(self.lease_id)}/renew", {"ttl_s": ttl_s})


def _reason(rollout: Rollout) -> str:
    failure = rollout.failure
    return f"{failure.kind.value}: {failure.code}: {failure.message}" if failure else rollout.state.value


def _spare(rollout: Rollout) -> bool:
    return rollout.failure is not None and rollout.failure.code == Stop.REDUNDANT


@dataclass(frozen=True, slots=True)
class ExportedGroup:
    """Samples made anew. ``left_out`` says why it has no rollouts."""

    group: Group
    rollouts: list[FinishedRollout]
    left_out: str | None = None

    @property
    def samples(self) -> list[Sample]:
        return [sample for rollout in self.rollouts for sample in rollout.samples]


class Over(Exception):
    """Nothing will come any more."""


def _check_over(delivery: Delivery) -> None:
    if delivery.over is None:
        return
    code, why = delivery.over
    if code == "source_failed":
        raise RemoteError(why, code=code, status=200, field="source", hint=None)
    raise Over(why)


def _finished(entry: DeliveredRollout) -> FinishedRollout:
    return FinishedRollout(
        Rollout.model_validate(entry.rollout),
        [from_wire(sample) for sample in entry.samples],
        entry.note,
        entry.tokens,
        entry.staleness,
        entry.stale,
    )


async def export(transport: Transport, run_id: str, settings: ExportSettings) -> AsyncIterator[ExportedGroup]:
    """All pages. Making samples changes nothing: a request whose answer is lost is sent again."""
    body = ExportGroups(**settings.model_dump(include=set(ExportSettings.model_fields)))
    while True:
        raw = await transport.request(
            "POST", f"/v1/runs/{part(run_id)}/export", body.model_dump(mode="json"), msgpack=True
        )
        page = msgspec.msgpack.decode(raw, type=ExportPage)
        for item in page.groups:
            rollouts = [_finished(entry) for entry in item.rollouts]
            yield ExportedGroup(Group.model_validate(item.group), rollouts, item.left_out)
        if page.next is None:
            return
        body = body.model_copy(update={"cursor": page.next})


async def lease(transport: Transport, run_id: str, body: LeaseGroups) -> list[FinishedGroup]:
    """One request for finished groups; empty when none finished within ``wait_s``. A lost answer is
    not asked for again: its lease expires and the groups come back. Raises ``Over`` when nothing will
    come any more, ``RemoteError`` (``source_failed``) when that is since the task source failed."""
    raw = await transport.request(
        "POST",
        f"/v1/runs/{part(run_id)}/deliveries",
        body.model_dump(),
        msgpack=True,
        repeatable=False,
    )
    delivery = msgspec.msgpack.decode(raw, type=Delivery)
    if delivery.lease is None:
        _check_over(delivery)
    return groups_of(transport, delivery)


def groups_of(transport: Transport, delivery: Delivery) -> list[FinishedGroup]:
    """What a delivery hands over, by pull or by callback."""
    granted = parse_lease(delivery)
    if granted is None:
        return []
    return [
        FinishedGroup(
            group=Group.model_validate(item.group),
            rollouts=[_finished(entry) for entry in item.rollouts],
            lease_id=granted.id,
            epoch=granted.epoch,
            policy_version=delivery.policy_version,
            _transport=transport,
        )
        for item in delivery.groups
    ]


async def epoch_of(transport: Transport, run_id: str, trainer: str) -> int:
    """The trainer's epoch now."""
    raw = await transport.request("GET", f"/v1/runs/{part(run_id)}/trainers/{part(trainer)}")
    return TrainerStatus.model_validate_json(raw).epoch


class GroupStream:
    """Finished groups as they come, one lease each, ``prefetch`` of them held ahead. Leases are
    renewed while held; when the stream is closed, unsettled ones are given back."""

    def __init__(
        self,
        transport: Transport,
        run_id: str,
        *,
        trainer: str,
        epoch: int | None,
        prefetch: int,
        ttl_s: float,
    ) -> None:
        self._transport = transport
        self._run_id = run_id
        self._body = LeaseGroups(
            trainer=trainer, epoch=epoch, max_groups=1, wait_s=min(20.0, ttl_s / 3), ttl_s=ttl_s
        )
        """``epoch`` is set before the first request: a trainer that was rewound by another must not go on
        under the other's epoch."""
        self._ttl_s = ttl_s
        self._ready: asyncio.Queue[FinishedGroup | BaseException] = asyncio.Queue(maxsize=max(1, prefetch))
        self._held: dict[str, FinishedGroup] = {}

    async def _fetch(self) -> None:
        try:
            if self._body.epoch is None:
                epoch = await epoch_of(self._transport, self._run_id, self._body.trainer)
                self._body = self._body.model_copy(update={"epoch": epoch})
            while True:
                for group in await self._lease():
                    self._held[group.lease_id] = group
                    await self._ready.put(group)
        except Exception as error:  # handed to the consumer, who raises it
            await self._ready.put(error)

    async def _lease(self) -> list[FinishedGroup]:
        """Asks again while the server is away (a restart), for ``PATIENCE_S`` at most: what a lost
        answer held comes back when its lease expires, so another request does no harm."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        delay_s = 0.2
        while True:
            try:
                return await lease(self._transport, self._run_id, self._body)
            except (QueueFull, Unavailable) as error:
                if loop.time() > until:
                    raise
                await asyncio.sleep(error.retry_after_s or delay_s)
                delay_s = min(5.0, delay_s * 2)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            for lease_id, group in list(self._held.items()):
                if group.settled:
                    self._held.pop(lease_id, None)
                    continue
                try:
                    await group.renew(self._ttl_s)
                except (LeaseLost, StaleEpoch):
                    self._held.pop(lease_id, None)  # the consumer learns of it from ack()
                except RollserveError:  # the server is away: the others, and this one next time
                    continue

    async def groups(self, *, auto_ack: bool) -> AsyncGenerator[FinishedGroup, None]:
        """Yields until the run is over; ``auto_ack`` acks a group when the next one is asked for."""
        tasks = [asyncio.create_task(self._fetch()), asyncio.create_task(self._renew())]
        try:
            while True:
                item = await self._ready.get()
                if isinstance(item, Over):
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
                if auto_ack:
                    await item.ack()
                if item.settled:
                    self._held.pop(item.lease_id, None)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._give_back()

    async def _give_back(self) -> None:
        """Best effort: what can't be given back now comes back when its lease expires."""
        for group in list(self._held.values()):
            if not group.settled:
                with_deadline = asyncio.wait_for(group.nack(), timeout=5)
                await asyncio.gather(with_deadline, return_exceptions=True)
