"""Figures, not a test: ``.venv/bin/python bench/store.py``."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import numpy as np

from rollserve.records.call import Call, Message, SamplingParams, VersionSpan, pack_floats, pack_ids
from rollserve.store.packing import pack, unpack
from rollserve.store.payload import AttemptPayload
from rollserve.store.payload_files import FilePayloadStore
from rollserve.store.sql import SqlStore
from rollserve.testing.store_facts import ending, make_group, open_run

T = TypeVar("T")


async def timed(what: str, work: Awaitable[T]) -> T:
    wall, cpu = time.perf_counter(), time.process_time()
    result = await work
    print(f"{what}: {1e3 * (time.perf_counter() - wall):.1f} ms, CPU {1e3 * (time.process_time() - cpu):.1f}")
    return result


async def measure_store(folder: Path) -> None:
    store = SqlStore(f"sqlite:///{folder / 'store.db'}")
    await timed("open (with migration)", store.open())
    run = await open_run(store, max_running_rollouts=100_000, max_queued_groups=1_000_000)
    keyed = [make_group(f"task {i}", 8, key=str(i)) for i in range(1000)]
    await timed("submit 1000 groups x 8", store.submit_groups(run.id, keyed))
    await timed("submit them again", store.submit_groups(run.id, keyed))
    for round_ in range(12):
        await store.submit_groups(run.id, [make_group(f"{round_} {i}", 8) for i in range(1000)])
    print(await store.run_counts(run.id))
    starts = []
    for _ in range(4):
        starts += await timed("start 256", store.start_rollouts(time.time(), 256))
    batches, operations = store.write_counts
    await timed(
        "finish 500 at once",
        asyncio.gather(*(store.finish_attempt(ending(start, reward=1.0)) for start in starts[:500])),
    )
    transactions, ran = store.write_counts
    print(f"  {ran - operations} operations in {transactions - batches} transactions")
    cpu = time.process_time()
    rollouts = 0
    for _ in range(20):
        taken = await store.start_rollouts(time.time(), 64)
        await asyncio.gather(*(store.finish_attempt(ending(start, reward=1.0)) for start in taken))
        rollouts += len(taken)
    print(f"CPU per rollout, start + finish in 64s: {1e3 * (time.process_time() - cpu) / rollouts:.3f} ms")
    cpu = time.process_time()
    for _ in range(200):
        (one,) = await store.start_rollouts(time.time(), 1)
        await store.finish_attempt(ending(one, reward=1.0))
    print(f"CPU per rollout, one at a time: {1e3 * (time.process_time() - cpu) / 200:.3f} ms")
    await timed("lease 64", store.lease_groups(run.id, "t", None, limit=64, ttl_s=60, now=time.time()))
    await timed("counts", store.run_counts(run.id))
    await timed("cancel all of 100k", store.cancel_rollouts(run_id=run.id))
    await store.close()


def make_trajectory(turns: int = 8, tokens: int = 32_768, sampled_share: float = 0.6) -> list[Call]:
    """Ids from a Zipf law over 150k, logprobs exponential, and text of four letters a token."""
    random = np.random.default_rng(0)
    per_turn = tokens // turns
    sampled = int(per_turn * sampled_share)
    calls = []
    words = np.array(["".join(random.choice(list("etaoinshrdlu"), 4)) for _ in range(20_000)])
    for turn in range(turns):
        ids = np.minimum(random.zipf(1.3, per_turn), 150_000).astype("<i4")
        text = " ".join(words[ids % 20_000])
        split = len(text) * (per_turn - sampled) // per_turn
        calls.append(
            Call(
                id=f"c{turn}",
                parent=f"c{turn - 1}" if turn else None,
                messages=(Message(role="user", content=text[:split]),),
                prompt_ids=pack_ids(ids[sampled:]),
                sampled_ids=pack_ids(ids[:sampled]),
                logprobs=pack_floats((-random.exponential(1.0, sampled)).astype("<f4")),
                versions=(VersionSpan(0, sampled, 1, 1),),
                reply=Message(role="assistant", content=text[split:]),
                finish_reason="stop",
                sampling=SamplingParams(),
            )
        )
    return calls


async def measure_payloads(folder: Path) -> None:
    calls = make_trajectory()
    tokens = sum(len(call.prompt_ids) + len(call.sampled_ids) for call in calls) // 4
    store = FilePayloadStore(folder)
    segment = store.open_segment("run_1", "att_1")
    start = time.perf_counter()
    for call in calls:
        segment.append_call(call)
    print(f"append: {1e6 * (time.perf_counter() - start) / len(calls):.0f} us per 4k-token call")
    sealed = await timed("seal", segment.seal())
    payload = await timed("read", store.read(sealed.ref))
    assert payload.calls == calls
    bare = [
        Call(
            id=call.id,
            parent=call.parent,
            messages=(),
            prompt_ids=call.prompt_ids,
            sampled_ids=call.sampled_ids,
            logprobs=call.logprobs,
            versions=call.versions,
            reply=Message(role="assistant"),
            finish_reason="stop",
            sampling=call.sampling,
        )
        for call in calls
    ]
    arrays = pack(AttemptPayload(calls=bare))
    assert unpack(arrays).calls == bare
    print(f"{tokens} tokens: {sealed.size_bytes / tokens:.2f} bytes a token with all text,")
    print(f"  {len(arrays) / tokens:.2f} for the token arrays alone")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure_store(Path(folder)))
        asyncio.run(measure_payloads(Path(folder) / "payloads"))


if __name__ == "__main__":
    main()
