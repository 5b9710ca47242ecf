"""A worker process over fakes: what an executor starts in tests (``python -m
rollserve.testing.worker_process``). The agent's name says how an attempt goes: ``tool`` ends at once,
``hang`` never, ``block`` stops the event loop for good, ``die`` kills the process, ``cry`` writes to
standard error and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from rollserve.agent.base import AgentResult, Episode
from rollserve.executor.worker_main import follow_parent, read_launch, serve
from rollserve.rollouts.clock import SystemClock
from rollserve.rollouts.stages import StageSlots
from rollserve.rollouts.worker import Worker
from rollserve.testing.fakes_worker import FakePorts, hang

COMMAND = (sys.executable, "-m", "rollserve.testing.worker_process")


async def _hang(episode: Episode) -> AgentResult:
    await hang()
    return AgentResult()


async def _block(episode: Episode) -> AgentResult:
    while True:
        time.sleep(60)  # noqa: ASYNC251  -- a loop that is stuck is what is wanted here


async def _die(episode: Episode) -> AgentResult:
    os.kill(os.getpid(), signal.SIGKILL)
    return AgentResult()


async def _cry(episode: Episode) -> AgentResult:
    sys.stderr.write(f"{episode.task.instruction}\n")
    sys.stderr.flush()
    return AgentResult(answer="ok")


async def main() -> None:
    launch = read_launch()
    follow_parent(launch, exit_within_s=3.0)
    fakes = FakePorts(SystemClock())
    fakes.agents.plays |= {"hang": _hang, "block": _block, "die": _die, "cry": _cry}
    worker = Worker(fakes.ports, worker_id=launch.worker_id, slots=StageSlots(), gateway_url="http://fake")
    await serve(launch, worker)


if __name__ == "__main__":
    asyncio.run(main())
