"""A process for ``test_store_kill`` to kill: it works on a store for ever and prints, as one line of
JSON each, what it was answered."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time

from rollserve.records.base import new_id
from rollserve.records.control import TaskSource
from rollserve.records.run import Run, SourceState, SourceStatus
from rollserve.store.sql import SqlStore
from rollserve.store.values import Fed, NewGroup
from rollserve.testing.store_facts import ending, make_group, open_run


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def submit(store: SqlStore, run_id: str, name: str) -> None:
    for n in itertools.count():
        key = f"{name}-{n}"
        groups = await store.submit_groups(run_id, [make_group(key, 2, key=key)])
        say(did="submit", key=key, group=groups[0].id)


async def work(store: SqlStore) -> None:
    while True:
        for start in await store.start_rollouts(time.time(), 2):
            await store.finish_attempt(ending(start, reward=float(start.rollout.index)))
            say(did="finish", rollout=start.rollout.id, reward=float(start.rollout.index))
        await asyncio.sleep(0)


async def take(store: SqlStore, run_id: str) -> None:
    for n in itertools.count():
        lease = await store.lease_groups(run_id, "t", None, limit=3, ttl_s=60, now=time.time())
        if lease is not None:
            await store.ack_lease(lease.id, now=time.time())
            say(did="ack", groups=lease.group_ids)
        if n % 5 == 4:
            await store.commit_checkpoint(run_id, "t", 0, name=f"c{n}", cursor=None, now=time.time())
            say(did="commit", name=f"c{n}")
        await asyncio.sleep(0)


async def feed(store: SqlStore, run_id: str) -> None:
    for place in itertools.count(step=3):
        groups = [
            NewGroup(task=make_group().task, num_rollouts=1, source_seq=each)
            for each in range(place, place + 3)
        ]
        await store.feed(run_id, Fed(position=place, next=place + 3, groups=groups))
        say(did="feed", next=place + 3)


async def main(url: str) -> None:
    store = SqlStore(url)
    await store.open()
    run = await open_run(store, max_queued_groups=1_000_000, max_undelivered_groups=1_000_000)
    spec = run.spec.model_copy(update={"source": TaskSource(path="x")})
    fed = Run(id=new_id("run"), spec=spec, created_at=time.time())
    await store.create_run(fed, SourceStatus(state=SourceState.RUNNING, position=0, lines=10**6, digest="d"))
    say(did="open", run=run.id, fed=fed.id)
    async with asyncio.TaskGroup() as tasks:
        for name in ("a", "b"):
            tasks.create_task(submit(store, run.id, name))
        for _ in range(4):
            tasks.create_task(work(store))
        tasks.create_task(take(store, run.id))
        tasks.create_task(feed(store, fed.id))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
