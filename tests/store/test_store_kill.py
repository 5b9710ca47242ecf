"""``kill -9`` of a real process that works on the store: whatever it was answered is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollserve.records.rollout import RolloutState
from rollserve.store.sql import SqlStore
from rollserve.testing.store_facts import NOW, ending, make_group

VICTIM = Path(__file__).with_name("store_victim.py")


def run_and_kill(url: str, lines: int) -> list[dict[str, Any]]:
    """Kill the victim once it has said ``lines`` things; all that it said whole."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(VICTIM), url], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        os.kill(process.pid, signal.SIGKILL)
        said += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    return [json.loads(line) for line in said if line.endswith(b"\n")]


async def drain(store: SqlStore, run_id: str) -> list[str]:
    """Finish all that is queued, and what is delivered then."""
    while starts := await store.start_rollouts(NOW, 500):
        for start in starts:
            await store.finish_attempt(ending(start, reward=0.0))
    delivered: list[str] = []
    while lease := await store.lease_groups(run_id, "t", None, limit=100, ttl_s=60, now=NOW + 1e6):
        await store.ack_lease(lease.id, now=NOW)
        delivered += lease.group_ids
    return delivered


async def check_source(store: SqlStore, said: list[dict[str, Any]]) -> None:
    """Its place is where its groups end: each task has one, and none is missing."""
    run_id = said[0]["fed"]
    source = await store.source(run_id)
    assert source is not None
    assert source.position >= max((item["next"] for item in said if item["did"] == "feed"), default=0)
    groups = (await store.list_groups(run_id, limit=100_000)).items
    assert [group.source_seq for group in groups] == list(range(source.position))


@pytest.mark.parametrize("lines", [40, 150, 400])
async def test_kill_loses_nothing_that_was_answered(tmp_path: Path, lines: int) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    said = run_and_kill(url, lines)
    assert len(said) >= lines
    store = SqlStore(url)
    await store.open()
    run_id = said[0]["run"]
    await store.recover(NOW, {})
    for item in said:
        match item:
            case {"did": "submit", "key": key, "group": group}:
                again = await store.submit_groups(run_id, [make_group(key, 2, key=key)])
                assert again[0].id == group
            case {"did": "finish", "rollout": rollout_id, "reward": reward}:
                rollout = await store.get_rollout(rollout_id)
                assert (rollout.state, rollout.reward) == (RolloutState.COMPLETED, reward)
            case _:
                assert item["did"] in ("open", "ack", "commit", "feed")
    await check_source(store, said)
    names = [item.name for item in (await store.list_checkpoints(run_id, "t")).items]
    assert {item["name"] for item in said if item["did"] == "commit"} <= set(names)
    acked = [group for item in said if item["did"] == "ack" for group in item["groups"]]
    assert len(acked) == len(set(acked))
    rest = await drain(store, run_id)
    assert not set(acked) & set(rest)
    counts = await store.run_counts(run_id)
    assert (counts["queued"], counts["running"], counts["groups_open"]) == (0, 0, 0)
    everything = {item["group"] for item in said if item["did"] == "submit"}
    taken_unheard = everything - set(acked) - set(rest)
    assert len(taken_unheard) <= 3  # of the one ack that was committed and not yet answered
    await store.close()
