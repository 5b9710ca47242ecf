"""Nothing is wasted silently: what workers say they sampled is what the bins hold, to the token."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from rollserve.errors import FailureKind
from rollserve.executor.base import StartAttempt
from rollserve.records.call import Call, VersionSpan
from rollserve.records.control import FilterRule, GroupRule, StalenessRule
from rollserve.records.rollout import RolloutState
from rollserve.records.run import RetrySettings, Run, RunSpec
from rollserve.rollouts.delivery import Wanted
from rollserve.store.payload import AttemptPayload
from rollserve.store.schema import attempts
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, a_call, ended, failed
from rollserve.testing.server_room import MakeRoom, Room

KINDS = {
    "completed": None,
    "crashed": failed(FailureKind.AGENT, "crash"),
    "broken": failed(FailureKind.INFRASTRUCTURE, "sandbox_error"),
}


class Workers:
    """Play attempts at random, by their seed; ``sampled`` is what they sampled, all in all."""

    def __init__(self, payloads: FakePayloads, seed: int) -> None:
        self.payloads = payloads
        self.random = random.Random(seed)
        self.sampled = 0
        self.version = 0
        self.lives = 0

    def executor(self) -> FakeExecutor:
        self.lives += 1
        executor = FakeExecutor(workers=3, capacity=40)
        executor.play = self.play
        return executor

    def play(self, executor: FakeExecutor, worker_id: str, start: StartAttempt) -> None:
        """Recorded in its segment first, then reported, late or never."""
        call = self.call()
        segment = self.payloads.open_segment(start.run_id, start.attempt_id)
        segment.append_call(call)
        self.sampled += len(call.sampled_ids) // 4
        if self.random.random() < 0.9:
            delay_s = self.random.choice((0.0, 0.0, 0.002, 0.03))
            kind = self.random.choices(list(KINDS), weights=(8, 1, 2))[0]
            end = partial(self.end, executor, start, kind, self.lives)
            asyncio.get_running_loop().call_later(delay_s, end)

    def call(self) -> Call:
        sampled = self.random.randint(1, 300)
        call = a_call(sampled=sampled)
        version = max(0, self.version - self.random.randint(0, 3))
        spans = (VersionSpan(0, sampled, version, version),)
        fields = {name: getattr(call, name) for name in call.__struct_fields__}
        return Call(**fields | {"versions": spans})

    def end(self, executor: FakeExecutor, start: StartAttempt, kind: str, life: int) -> None:
        if life != self.lives or start.attempt_id not in executor.started:
            return  # it died with its server, or with its worker
        ref = f"{start.run_id}/{start.attempt_id}"
        live = self.payloads.live.pop(ref)
        self.payloads.keep(ref, live)
        cancelled = any(cancel.attempt_id == start.attempt_id for cancel in executor.cancels)
        failure = failed(FailureKind.CANCELLED) if cancelled else KINDS[kind]
        outcome = RolloutState.CANCELLED if cancelled else None
        reward = self.random.choice((0.0, 1.0))
        done = ended(start, reward=reward, failure=failure, outcome=outcome, payload=ref)
        sampled = sum(len(call.sampled_ids) // 4 for call in live.calls)
        executor.end(start.attempt_id, done.model_copy(update={"counts": {"sampled_tokens": sampled}}))

    def hanging(self, executor: FakeExecutor) -> list[StartAttempt]:
        """What runs, or will never end by itself."""
        started = [start for _, start in executor.started.values()]
        return [start for start in started if f"{start.run_id}/{start.attempt_id}" in self.payloads.live]

    def stop_hanging(self, executor: FakeExecutor) -> None:
        """What was cancelled ends."""
        for cancel in list(executor.cancels):
            found = executor.started.get(cancel.attempt_id)
            if found and f"{found[1].run_id}/{cancel.attempt_id}" in self.payloads.live:
                self.end(executor, found[1], "completed", self.lives)


SPECS: list[dict[str, Any]] = [
    {"filters": (FilterRule(name="zero_variance"),)},
    {"groups": GroupRule(oversample=2, deadline_s=0.3)},
    {"groups": GroupRule(min_usable=3, stragglers="cancel", deadline_s=0.5)},
    {"staleness": StalenessRule(max_staleness=1, on_stale="mask"), "groups": GroupRule(deadline_s=0.4)},
    {"staleness": StalenessRule(max_staleness=1, on_stale="withhold"), "groups": GroupRule(deadline_s=0.4)},
    {"staleness": StalenessRule(max_staleness=2), "groups": GroupRule(min_usable=2, deadline_s=0.4)},
]


async def booked(room: Room, runs: list[Run]) -> Counter[str]:
    """Tokens by bin, over all runs; each run's are those of its attempts, one by one."""
    total: Counter[str] = Counter()
    for run in runs:
        bins = (await room.core.runs.bins(run.id)).get("tokens", {})
        assert all(found.count >= 0 and found.tokens >= 0 for found in bins.values()), bins
        found = Counter({name: each.tokens for name, each in bins.items() if each.tokens})
        assert found == await by_attempt(room, run)
        total += found
    return total


async def by_attempt(room: Room, run: Run) -> Counter[str]:
    query = sa.select(attempts).where(attempts.c.run_id == run.id, attempts.c.fate.is_not(None))
    rows = await room.store._read(lambda conn: conn.execute(query).all())
    total: Counter[str] = Counter()
    for row in rows:
        total[row.fate] += row.sampled - row.masked - row.left_out
        total["masked"] += row.masked
        total["left_out"] += row.left_out
    return Counter({name: tokens for name, tokens in total.items() if tokens})


async def deliver(room: Room, run: Run, chance: random.Random, waits: float = 0.0) -> bool:
    wanted = Wanted(trainer="t", max_groups=chance.randint(1, 9), wait_s=waits)
    lease = (await room.core.deliveries.lease(run.id, wanted)).lease
    if lease is None:
        return False
    if chance.random() < 0.15:
        await room.core.deliveries.nack(lease.id)
    else:
        await room.core.deliveries.ack(lease.id)
    return True


async def disturb(room: Room, runs: list[Run], workers: Workers, round_: int) -> None:
    chance = workers.random
    run = chance.choice(runs)
    groups = (await room.core.groups.of_run(run.id, state="open", cursor=None, limit=50)).items
    if groups and chance.random() < 0.5:
        await room.core.groups.cancel_group(chance.choice(groups).id)
    hanging = workers.hanging(room.executor)
    for start in chance.sample(hanging, min(len(hanging), 2)):
        await room.core.groups.cancel_rollout(start.rollout_id)
    if chance.random() < 0.3:
        room.executor.kill(f"w{chance.randint(1, 3)}")
    for run in runs:
        await deliver(room, run, chance)
    if round_ % 7 == 3:
        workers.version += 1
        await room.core.policies.set_version("pol", workers.version, None)
    if round_ % 11 == 5:
        await room.core.deliveries.commit(
            run.id,
            "t",
            await room.store.trainer_epoch(run.id, "t"),
            name=f"c{workers.lives}-{round_}",
            cursor=None,
        )
    workers.stop_hanging(room.executor)


async def drained(room: Room, runs: list[Run], workers: Workers) -> None:
    """Until no rollout is on its way, and no worker owes a report."""
    while True:
        workers.stop_hanging(room.executor)
        counts = [await room.core.runs.counts(run.id) for run in runs]
        owed = await room.store.list_interrupted()
        if not owed and not any(count["groups_open"] for count in counts):
            return
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_every_sampled_token_is_in_exactly_one_bin(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    workers = Workers(payloads, seed=4)
    runs: list[Run] = []
    for life in range(4):
        async with make_room(workers.executor(), payloads=payloads) as room:
            if not runs:
                first = await room.run(retry=RetrySettings(max_attempts=3, backoff_s=0), **SPECS[0])
                runs = [first]
                for spec in SPECS[1:]:
                    other = {"policy": "pol", "retry": {"max_attempts": 3, "backoff_s": 0}, **spec}
                    runs.append(await room.core.runs.open(RunSpec.model_validate(other)))
            for run in runs:
                await room.submit(run, groups=30, rollouts=4, rule=deadline(run))
            for round_ in range(20):
                await disturb(room, runs, workers, round_)
                await asyncio.sleep(0.01)
            await booked(room, runs)
            if life == 3:
                await finish(room, runs, workers)


def deadline(run: Run) -> GroupRule:
    """Some attempts never end by themselves."""
    rule = run.spec.groups
    return rule if rule.deadline_s is not None else rule.model_copy(update={"deadline_s": 0.5})


async def finish(room: Room, runs: list[Run], workers: Workers) -> None:
    async with asyncio.timeout(240):
        await drained(room, runs, workers)
        for run in runs:
            while await deliver(room, run, workers.random):
                continue
    found = await booked(room, runs)
    assert found.total() == workers.sampled
    assert found["waiting"] == 0
    # Whether a cancel meets an attempt that runs, or a worker that is slow, is a matter of time.
    assert {"delivered", "masked", "filtered", "stale", "redundant", "short", "failed", "retried"} <= set(
        found
    )
    counts = [await room.core.runs.counts(run.id) for run in runs]
    assert sum(count["completed"] + count["failed"] + count["cancelled"] for count in counts) >= 2880
    await rewound(room, runs, found)


async def rewound(room: Room, runs: list[Run], found: Counter[str]) -> None:
    """What is to be delivered again waits again, and not a token goes astray."""
    for run in runs:
        await room.core.deliveries.rewind(run.id, "t", None)
    again = await booked(room, runs)
    assert again.total() == found.total()
    handed = ("delivered", "masked", "left_out", "stale")
    assert again["waiting"] == sum(found[name] for name in handed)


async def test_a_lost_attempts_tokens_are_counted_from_its_record(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    async with make_room(FakeExecutor(), payloads=payloads) as room:
        run = await room.run()
        await room.submit(run, rollouts=2)
        await room.started(2)
        for start in room.executor.history:
            payloads.open_segment(run.id, start.attempt_id).append_call(a_call(sampled=7))
        room.executor.kill("w1")
        await room.started(4)
        payloads.live[f"{run.id}/{room.executor.history[2].attempt_id}"] = AttemptPayload(
            calls=[a_call(sampled=5)]
        )
    async with make_room(FakeExecutor(), payloads=payloads) as room:
        bins = (await room.core.runs.bins(run.id))["tokens"]
        assert (bins["retried"].count, bins["retried"].tokens) == (4, 19)


async def test_what_no_sample_holds_is_told_apart(make_room: MakeRoom) -> None:
    """A payload that can't be read, and a call that is not exact."""
    payloads = FakePayloads()
    async with make_room(FakeExecutor(), payloads=payloads) as room:
        run = await room.run()
        await room.submit(run, rollouts=3)
        await room.started(3)
        for index, start in enumerate(room.executor.history):
            call = a_call(sampled=10)
            inexact = {name: getattr(call, name) for name in call.__struct_fields__} | {
                "inexact": "retokenized"
            }
            calls = [Call(**inexact) if index == 1 else call]
            ref = payloads.keep(start.attempt_id, AttemptPayload(calls=calls))
            done = ended(start, payload=ref).model_copy(update={"counts": {"sampled_tokens": 10}})
            room.executor.end(start.attempt_id, done)
        payloads.unreadable.add(room.executor.history[2].attempt_id)
        wanted = Wanted(trainer="t", wait_s=20)
        lease = (await room.core.deliveries.lease(run.id, wanted)).lease
        assert lease is not None
        await room.core.deliveries.ack(lease.id)
        bins = (await room.core.runs.bins(run.id))["tokens"]
        assert {name: found.tokens for name, found in bins.items()} == {"delivered": 10, "left_out": 20}
