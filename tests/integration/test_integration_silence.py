"""Whose fault it is when nothing comes back, and what an agent hears that goes on after its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollserve.cli.processes import Processes, Running
from rollserve.errors import FailureKind
from rollserve.records.rollout import RolloutState
from rollserve.records.task import AgentSpec, Limits
from rollserve.testing.scripted import Fault, ScriptedEngine
from rollserve.wire import OpenRun
from tests.integration.conftest import Server, add_policy, finished, one, play, shell_task

AGENTS = ["tool", "my_agents:OpenAIAgent"]


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_engine_that_says_nothing_is_not_the_agents_limit(
    server: Server, backend_url: str, engine: ScriptedEngine, agent: str
) -> None:
    """It accepts the call and answers ``/health``: a hung engine behind a live server."""
    async with server.client() as client:
        await add_policy(client, backend_url)
        engine.faults.append(Fault(kind="hang"))
        # the second attempt has to be done in this time, on a machine that is busy too
        group = await play(client, agent=AgentSpec(name=agent), limits=Limits(run_s=6))
        (rollout,) = group.rollouts
        first, second = [attempt async for attempt in client.attempts(rollout.rollout.id)]
    assert first.failure is not None
    assert first.failure.kind is FailureKind.INFRASTRUCTURE
    assert first.failure.code == "backend_unavailable"
    assert "its engine samples nothing" in first.failure.message
    assert first.reward is None
    assert first.truncated_by is None
    assert second.failure is None
    assert rollout.rollout.state is RolloutState.COMPLETED
    assert rollout.reward == 1.0
    assert engine.aborted == 1


async def test_the_settings_reach_the_pools(
    make_server: Callable[..., Server], backend_url: str, engine: ScriptedEngine
) -> None:
    server = make_server("backends.silent_s=2")
    await server.start()
    async with server.client() as client:
        await add_policy(client, backend_url)
        engine.faults.append(Fault(kind="hang"))
        group = await play(client)
        (rollout,) = group.rollouts
        first, _ = [attempt async for attempt in client.attempts(rollout.rollout.id)]
    assert first.failure is not None
    assert first.failure.kind is FailureKind.INFRASTRUCTURE
    assert "took a call and then said nothing for 2 s" in first.failure.message
    assert rollout.reward == 1.0


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_slow_engine_is_a_limit_and_graded(
    server: Server, backend_url: str, engine: ScriptedEngine, agent: str
) -> None:
    async with server.client() as client:
        await add_policy(client, backend_url)
        engine.latency_s = 8.0
        group = await play(client, agent=AgentSpec(name=agent), limits=Limits(run_s=2))
    (rollout,) = group.rollouts
    assert rollout.rollout.state is RolloutState.COMPLETED, rollout.rollout.failure
    assert rollout.rollout.truncated_by == "run_s"
    assert rollout.reward == 0.0


@pytest.fixture
async def frozen(tmp_path: Path) -> AsyncIterator[tuple[Running, str]]:
    """A backend in a process of its own that takes its time, and can be stopped in the middle."""
    processes = Processes(tmp_path / "backend")
    port = processes.port()
    command = [sys.executable, "-m", "rollserve.testing.scripted_server", "--port", str(port)]
    running = processes.start("backend", [*command, "--latency-ms", "20000", "--tokens", "40"])
    url = f"http://127.0.0.1:{port}"
    await processes.wait_ready(running, f"{url}/health", 30)
    yield running, url
    os.kill(running.process.pid, signal.SIGCONT)
    processes.stop()


async def test_a_stopped_backend_is_infrastructure_for_every_agent(
    server: Server, frozen: tuple[Running, str]
) -> None:
    running, url = frozen
    async with server.client() as client:
        await add_policy(client, url)
        run = await client.open_run(OpenRun.model_validate({"policy": "tiny", "retry": {"max_attempts": 1}}))
        tasks = [shell_task(agent=AgentSpec(name=name), limits=Limits(run_s=8)) for name in AGENTS]
        await run.submit(tasks, num_rollouts=1)
        async with asyncio.timeout(90):
            while (await client.status()).stages.get("run", 0) < len(AGENTS):
                await asyncio.sleep(0.02)
        os.kill(running.process.pid, signal.SIGSTOP)
        groups = await finished(run, len(AGENTS))
    for group in groups:
        (rollout,) = group.rollouts
        assert rollout.rollout.state is RolloutState.FAILED
        assert rollout.reward is None
        assert rollout.rollout.failure is not None
        assert rollout.rollout.failure.kind is FailureKind.INFRASTRUCTURE
        assert "was silent for" in rollout.rollout.failure.message
        assert "did not answer" in rollout.rollout.failure.message


async def test_an_agents_process_that_goes_on_is_told_to_stop(
    server: Server, backend_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    script = Path(__file__).with_name("goes_on.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(folder), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with server.client() as client:
            agent = AgentSpec(name="my_agents:Leaver", options={"folder": str(folder)})
            group = await one(client, backend_url, agent=agent)
            assert group.rollouts[0].reward == 1.0, group.rollouts[0].rollout.failure
            async with asyncio.timeout(90):
                said = json.loads((await process.communicate())[0])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert said["refused"] == [[400, "session_closed"]] * 2
    assert "its attempt has ended" in said["message"]
