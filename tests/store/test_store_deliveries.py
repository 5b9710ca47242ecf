"""Deliveries in random order against a model small enough to be read and believed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rollserve.errors import Conflict, LeaseLost, RollserveError, StaleEpoch
from rollserve.store.sql import SqlStore
from rollserve.testing.store_facts import NOW, finish_groups, open_run

T = TypeVar("T")
TRAINERS = st.sampled_from(["a", "b"])
PICK = st.integers(0, 50)


@dataclass
class Lease:
    """As the model sees one: ``state`` is leased, acked or gone."""

    id: str
    trainer: str
    epoch: int
    groups: list[str]
    expires_at: float
    state: str = "leased"


@dataclass
class Trainer:
    """``held`` says of each group of the log this trainer has: leased, acked, or its checkpoint."""

    epoch: int = 0
    held: dict[str, str] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)


class Deliveries(RuleBasedStateMachine):
    def __init__(self, runner: asyncio.Runner, store: SqlStore) -> None:
        super().__init__()
        self.runner = runner
        self.store = store
        self.run_id = self.do(open_run(store)).id
        self.now = NOW
        self.log: list[str] = []
        self.trainers = {"a": Trainer(), "b": Trainer()}
        self.leases: list[Lease] = []
        self.names = 0

    def do(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await work

        return self.runner.run(main())

    def outcome(self, work: Awaitable[object]) -> type[RollserveError] | None:
        try:
            self.do(work)
        except RollserveError as error:
            return type(error)
        return None

    def give_back_expired(self, trainer: str | None) -> int:
        count = 0
        for lease in self.leases:
            expired = lease.state == "leased" and lease.expires_at <= self.now
            if expired and trainer in (None, lease.trainer):
                self.give_back(lease)
                count += 1
        return count

    def give_back(self, lease: Lease) -> None:
        lease.state = "gone"
        if lease.epoch == self.trainers[lease.trainer].epoch:
            for group in lease.groups:
                del self.trainers[lease.trainer].held[group]

    def expected(self, lease: Lease) -> type[RollserveError] | None:
        if lease.state == "gone":
            return LeaseLost
        return StaleEpoch if lease.epoch != self.trainers[lease.trainer].epoch else None

    @rule(count=st.integers(1, 4))
    def finish(self, count: int) -> None:
        self.log += [group.id for group in self.do(finish_groups(self.store, self.run_id, count))]

    @rule(seconds=st.sampled_from([1.0, 5.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=TRAINERS, limit=st.integers(1, 5), ttl_s=st.sampled_from([3.0, 30.0]))
    def lease(self, name: str, limit: int, ttl_s: float) -> None:
        trainer = self.trainers[name]
        self.give_back_expired(name)
        wanted = [group for group in self.log if group not in trainer.held][:limit]
        lease = self.do(
            self.store.lease_groups(self.run_id, name, None, limit=limit, ttl_s=ttl_s, now=self.now)
        )
        if lease is None:
            assert wanted == []
            return
        assert lease.group_ids == wanted
        assert lease.epoch == trainer.epoch
        trainer.held.update(dict.fromkeys(wanted, "leased"))
        self.leases.append(Lease(lease.id, name, lease.epoch, wanted, self.now + ttl_s))

    @rule(pick=PICK)
    def ack(self, pick: int) -> None:
        if self.leases:
            lease = self.leases[pick % len(self.leases)]
            expected = self.expected(lease)
            assert self.outcome(self.store.ack_lease(lease.id, now=self.now)) is expected
            if expected is None and lease.state == "leased":
                lease.state = "acked"
                self.trainers[lease.trainer].held.update(dict.fromkeys(lease.groups, "acked"))

    @rule(pick=PICK)
    def nack(self, pick: int) -> None:
        if self.leases:
            lease = self.leases[pick % len(self.leases)]
            expected = self.expected(lease)
            if expected is None and lease.state == "acked":
                expected = LeaseLost
            assert self.outcome(self.store.nack_lease(lease.id)) is expected
            if expected is None:
                self.give_back(lease)

    @rule(pick=PICK, ttl_s=st.sampled_from([3.0, 30.0]))
    def renew(self, pick: int, ttl_s: float) -> None:
        if self.leases:
            lease = self.leases[pick % len(self.leases)]
            expected = self.expected(lease)
            got = self.outcome(self.store.renew_lease(lease.id, ttl_s=ttl_s, now=self.now))
            assert got is expected
            if expected is None and lease.state == "leased":
                lease.expires_at = self.now + ttl_s

    @rule()
    def expire(self) -> None:
        assert self.do(self.store.expire_leases(self.now)) >= self.give_back_expired(None)

    @rule(name=TRAINERS, again=st.booleans(), behind=st.integers(0, 1))
    def commit(self, name: str, again: bool, behind: int) -> None:
        trainer = self.trainers[name]
        acked = [group for group, state in trainer.held.items() if state == "acked"]
        known = again and bool(trainer.checkpoints)
        self.names += not known
        checkpoint = trainer.checkpoints[-1] if known else f"c{self.names}"
        epoch = trainer.epoch - behind
        expected = StaleEpoch if behind else Conflict if known and acked else None
        got = self.outcome(
            self.store.commit_checkpoint(self.run_id, name, epoch, name=checkpoint, cursor=None, now=self.now)
        )
        assert got is expected
        if expected is None and not known:
            trainer.checkpoints.append(checkpoint)
            trainer.held.update(dict.fromkeys(acked, checkpoint))

    @rule(name=TRAINERS, pick=PICK)
    def rewind(self, name: str, pick: int) -> None:
        trainer = self.trainers[name]
        keep = pick % (len(trainer.checkpoints) + 1)
        target = trainer.checkpoints[keep - 1] if keep else None
        epoch, checkpoint = self.do(self.store.rewind(self.run_id, name, target, now=self.now))
        trainer.epoch += 1
        trainer.checkpoints = trainer.checkpoints[:keep]
        trainer.held = {group: state for group, state in trainer.held.items() if state in trainer.checkpoints}
        assert epoch == trainer.epoch
        assert (checkpoint.name if checkpoint else None) == target

    @invariant()
    def counts_undelivered(self) -> None:
        taken = {
            group
            for trainer in self.trainers.values()
            for group, state in trainer.held.items()
            if state != "leased"
        }
        counts = self.do(self.store.run_counts(self.run_id))
        assert counts["groups_undelivered"] == len(self.log) - len(taken)
        assert counts["groups_finished"] == len(self.log)

    @invariant()
    def keeps_checkpoints(self) -> None:
        for name, trainer in self.trainers.items():
            kept = self.do(self.store.list_checkpoints(self.run_id, name)).items
            assert [checkpoint.name for checkpoint in kept] == trainer.checkpoints


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_deliveries_follow_the_model(runner: asyncio.Runner, tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path / 'store.db'}")
    runner.run(store.open())
    run_state_machine_as_test(
        cast("type[RuleBasedStateMachine]", partial(Deliveries, runner, store)),  # any factory will do
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    runner.run(store.close())
