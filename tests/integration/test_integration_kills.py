"""``kill -9`` of real processes, in the middle of real work."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from rollserve.client import Client
from rollserve.records.rollout import Attempt, RolloutState
from rollserve.testing.repository_task import policy
from rollserve.testing.runtime_probes import processes_with_environment, unique_seconds
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_server import serving
from rollserve.wire import OpenRun
from tests.integration.conftest import Server, add_policy, alive, descendants, gone, shell_task, until
from tests.integration.repository import has_git_and_python, repository_task

GROUPS, ROLLOUTS = 25, 4
MARK = "ROLLSERVE_TEST_REPOSITORY"


async def drain(client: Client, run_id: str, acked: list[str], count: int) -> None:
    """Ack groups until ``count`` in all have been. A lease whose answer the kill has cut off comes back
    when it expires, which is soon."""
    run = await client.run(run_id)
    async with aclosing(run.groups(trainer="learner", auto_ack=False, prefetch=2, ttl_s=10)) as groups:
        while len(acked) < count:
            group = await anext(groups)
            await group.ack()
            acked.append(group.group.id)


async def test_the_server_killed_twice_amid_100_rollouts_loses_and_doubles_nothing(
    make_server: Callable[..., Server], backend_url: str, engine: ScriptedEngine
) -> None:
    engine.latency_s = 0.05
    server = make_server("workers.run_slots=16")
    await server.start()
    acked: list[str] = []
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        groups = await run.submit([shell_task()] * GROUPS, num_rollouts=ROLLOUTS, key="all")
        for stop_at in (5, 12):
            await drain(client, run.id, acked, stop_at)
            finished = [r.id async for r in client.rollouts(run_id=run.id, state="completed")]
            below = descendants(server.pid)
            assert below
            server.kill()
            await gone(below)
            await server.start()
            for rollout_id in finished:
                assert (await client.rollout(rollout_id)).rollout.state is RolloutState.COMPLETED
            again = await run.submit([shell_task()] * GROUPS, num_rollouts=ROLLOUTS, key="all")
            assert [group.id for group in again] == [group.id for group in groups]
        await drain(client, run.id, acked, GROUPS)
        assert sorted(acked) == sorted(group.id for group in groups)
        assert len(set(acked)) == GROUPS
        counts = (await run.status()).counts
        assert counts["completed"] == GROUPS * ROLLOUTS
        assert counts["queued"] == counts["running"] == 0
        assert len(await records_of_lost(client, run.id, "server_restart")) >= 8


async def records_of_lost(client: Client, run_id: str, code: str) -> list[Attempt]:
    """Interrupted attempts, each with the log it had when it was interrupted."""
    lost = [
        attempt
        async for rollout in client.rollouts(run_id=run_id)
        if rollout.epoch > 1
        async for attempt in client.attempts(rollout.id)
        if attempt.failure is not None and attempt.failure.code == code
    ]
    for attempt in lost:
        assert bool(await client.log(attempt.id)) == (attempt.payload is not None)
    return [attempt for attempt in lost if attempt.payload is not None]


async def test_a_killed_worker_is_replaced_and_its_attempts_run_again(
    make_server: Callable[..., Server], backend_url: str, engine: ScriptedEngine
) -> None:
    engine.latency_s = 0.1
    server = make_server("workers.count=2", "workers.run_slots=8")
    await server.start()
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        engine.gate.clear()  # until all slots of both are taken
        await run.submit([shell_task()] * 10, num_rollouts=4)
        await until_running(client, 16)
        worker = (await client.status()).workers[0]["pid"]
        engine.gate.set()
        below = descendants(worker)
        os.kill(worker, signal.SIGKILL)
        await gone(below)
        acked: list[str] = []
        await drain(client, run.id, acked, 10)
        assert (await run.status()).counts["completed"] == 40
        assert await records_of_lost(client, run.id, "worker_lost")
        async with asyncio.timeout(90):
            while len((await client.status()).workers) < 2:
                await asyncio.sleep(0.1)


async def until_running(client: Client, count: int) -> None:
    async with asyncio.timeout(90):
        while (await client.status()).stages.get("run", 0) < count:
            await asyncio.sleep(0.02)


async def test_stopping_the_server_leaves_no_process(
    server: Server, backend_url: str, engine: ScriptedEngine
) -> None:
    engine.latency_s = 5.0
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        await run.submit([shell_task()] * 4, num_rollouts=2)
        await until_running(client, 4)
    below = descendants(server.pid)
    server.stop()
    await gone(below)


async def test_cancel_reaches_the_backend_and_the_sandbox(
    server: Server, backend_url: str, engine: ScriptedEngine
) -> None:
    engine.latency_s = 30.0
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        (group,) = await run.submit([shell_task()], num_rollouts=2)
        await until_running(client, 2)
        await until(lambda: engine.started - engine.finished - engine.aborted == 2)
        before = engine.aborted
        await client.cancel_group(group.id)
        await until(lambda: engine.aborted == before + 2)
        acked: list[str] = []
        await drain(client, run.id, acked, 1)
        rollouts = [rollout async for rollout in client.rollouts(group_id=group.id)]
        assert {rollout.state for rollout in rollouts} == {RolloutState.CANCELLED}
        assert all(rollout.reward is None for rollout in rollouts)


async def test_a_group_leased_before_the_kill_can_be_acked_after_it(
    make_server: Callable[..., Server], backend_url: str
) -> None:
    server = make_server()
    await server.start()
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        submitted = await run.submit([shell_task()] * 4, num_rollouts=1)
        acked: list[str] = []
        async with aclosing(run.groups(trainer="learner", auto_ack=False, prefetch=1)) as groups:
            held = await anext(groups)
            server.kill()
            await server.start()
            await held.ack()
            acked.append(held.group.id)
            while len(acked) < 4:
                group = await anext(groups)
                await group.ack()
                acked.append(group.group.id)
    assert sorted(acked) == sorted(group.id for group in submitted)


@pytest.mark.userns
@pytest.mark.slow
@pytest.mark.skipif(not has_git_and_python(), reason="this machine has no git, or no Python in /usr/bin")
async def test_a_worker_killed_amid_16_repository_tasks_leaves_nothing(
    make_server: Callable[..., Server], runtime: str, open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runtime != "bubblewrap":
        pytest.skip("bubblewrap can't be used here")
    mark = unique_seconds()
    folders = open_dir / "t"
    folders.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders))  # the sandboxes' user can't enter pytest's folder
    app = policy("mends", latency_s=0.3)
    server = make_server(f"images.dir={open_dir}/images", "workers.run_slots=16")
    await server.start()
    async with serving(app) as url, server.client() as client:
        await add_policy(client, url)
        run = await client.open_run(OpenRun(policy="tiny"))
        task = repository_task(env={MARK: mark})
        app.engine.gate.clear()  # until all run at the same time
        await run.submit([task] * 4, num_rollouts=4)
        await until_running(client, 16)
        worker = (await client.status()).workers[0]["pid"]
        app.engine.gate.set()
        await until(lambda: app.engine.finished >= 16)
        assert processes_with_environment(f"{MARK}={mark}")
        below, before = descendants(worker), set(folders.glob("rollserve-bwrap-*"))
        os.kill(worker, signal.SIGKILL)
        await until(lambda: not alive(below) and not processes_with_environment(f"{MARK}={mark}"))
        acked: list[str] = []
        await drain(client, run.id, acked, 4)
        rewards = [rollout.reward async for rollout in client.rollouts(run_id=run.id)]
        assert rewards == [1.0] * 16
        assert await records_of_lost(client, run.id, "worker_lost")
        await until(lambda: not processes_with_environment(f"{MARK}={mark}"))
        assert len(before - set(folders.iterdir())) == 1  # the killed worker's; its heir has removed it
    server.stop()
    assert list(folders.iterdir()) == []
    (user,) = (open_dir / "images").iterdir()
    assert list((user / "tmp").iterdir()) == []
