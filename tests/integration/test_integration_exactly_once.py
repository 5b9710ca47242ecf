"""Promise 3 as a trainer sees it: ``kill -9`` of server and trainer at random moments, and a second trainer
beside the first. Each finished rollout is in the history of the final parameters exactly once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollserve.cli.processes import Processes, Running
from rollserve.client import Client, RunHandle
from rollserve.records.control import TaskSource
from rollserve.records.rollout import RolloutState
from rollserve.records.run import Quota
from rollserve.testing.scripted import ScriptedEngine
from rollserve.wire import OpenRun
from tests.integration import learner
from tests.integration.conftest import Server, add_policy, descendants, gone, shell_task, until

KILLS = 10
SOURCE = TaskSource(tasks=(shell_task(runtime="none", tools=[]),), num_rollouts=2, in_flight=8, epochs=None)


class Trainers:
    """Trainer processes of one run, all with the same folder of checkpoints."""

    def __init__(self, folder: Path, url: str, run_id: str) -> None:
        self._folder = folder / "checkpoints"
        self._folder.mkdir()
        self._processes = Processes(folder / "trainers")
        self._command = [sys.executable, learner.__file__, url, run_id, str(self._folder)]
        self._started = 0
        self.now = self._start()

    def _start(self) -> Running:
        self._started += 1
        return self._processes.start(f"trainer{self._started}", self._command)

    def kill(self) -> None:
        """By SIGKILL, and start another."""
        self.now.process.kill()
        assert self.now.process.wait() == -signal.SIGKILL, self.now.tail()
        self._processes.forget(self.now)
        self.now = self._start()

    async def take_over(self) -> None:
        """Start another while this one lives, held still until that one has begun; then it is fenced."""
        await until(lambda: self._began(self.now), 60)
        old, self.now = self.now, self._start()
        os.kill(old.process.pid, signal.SIGSTOP)
        await until(lambda: self._began(self.now), 60)
        os.kill(old.process.pid, signal.SIGCONT)
        await until(lambda: old.process.poll() is not None, 60)
        assert old.process.returncode == learner.FENCED, old.tail()
        self._processes.forget(old)

    def _began(self, trainer: Running) -> bool:
        return (self._folder / f"started.{trainer.process.pid}").exists()

    async def end(self) -> list[str]:
        """The history of the final parameters, once the run is over."""
        code = await asyncio.to_thread(self.now.process.wait, 90)
        assert code == 0, self.now.tail()
        return learner.read(self._folder, learner.checkpoints(self._folder)[-1])

    def stop(self) -> None:
        self._processes.stop(grace_s=1.0)  # one that is held still hears no SIGTERM


@pytest.fixture
def make_trainers(tmp_path: Path) -> Iterator[Callable[[str, str], Trainers]]:
    made: list[Trainers] = []

    def make(url: str, run_id: str) -> Trainers:
        made.append(Trainers(tmp_path, url, run_id))
        return made[-1]

    yield make
    for trainers in made:
        trainers.stop()


async def restart(server: Server) -> None:
    below = descendants(server.pid)
    server.kill()
    await gone(below)
    await server.start()


async def disturb(server: Server, trainers: Trainers, chance: random.Random) -> None:
    """``KILLS`` of each, and two take-overs, in any order; a trainer may be killed while the server is away
    or it has just begun."""
    steps = ["server"] * KILLS + ["trainer"] * KILLS + ["take over"] * 2
    chance.shuffle(steps)
    restarting: asyncio.Task[None] | None = None
    for step in steps:
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        if restarting is not None and step != "trainer":
            await restarting
        if step == "server":
            restarting = asyncio.create_task(restart(server))
        elif step == "trainer":
            trainers.kill()
        else:
            await trainers.take_over()
    if restarting is not None:
        await restarting


async def completed(client: Client, run: RunHandle) -> list[str]:
    state = RolloutState.COMPLETED.value
    return [rollout.id async for rollout in client.rollouts(run_id=run.id, state=state)]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_finished_rollout_once_in_the_final_parameters(
    make_server: Callable[..., Server],
    make_trainers: Callable[[str, str], Trainers],
    backend_url: str,
    engine: ScriptedEngine,
) -> None:
    server = make_server("workers.run_slots=8")
    await server.start()
    async with server.client() as client:
        await add_policy(client, backend_url)
        quota = Quota(max_undelivered_groups=16)
        run = await client.open_run(OpenRun(policy="tiny", source=SOURCE, quota=quota))
        trainers = make_trainers(server.url, run.id)
        await disturb(server, trainers, random.Random(17))
        before = await completed(client, run)
        async with asyncio.timeout(60):
            while len(await completed(client, run)) < len(before) + 20:
                await asyncio.sleep(0.1)
        await run.close()
        history = await trainers.end()
        finished = await completed(client, run)
        assert len(history) == len(set(history))
        assert set(history) == set(finished)
