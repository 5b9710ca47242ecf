"""A trainer as a process, to be killed at any moment. Its parameters are the rollouts it has consumed.

A checkpoint is a file, named after its step and the trainer's epoch: written whole, then committed. It
starts from the newest one that was committed. Ends with 0 when the run is over, with 3 when another trainer
took over.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import aclosing
from pathlib import Path

from rollserve.client import Client, RunHandle
from rollserve.errors import LeaseLost, QueueFull, StaleEpoch, Unavailable
from rollserve.records.rollout import RolloutState

FENCED = 3
GROUPS_PER_CHECKPOINT = 3


def checkpoints(folder: Path) -> list[str]:
    """Oldest first."""
    return sorted(path.stem for path in folder.glob("*.json"))


def read(folder: Path, name: str) -> list[str]:
    found: list[str] = json.loads((folder / f"{name}.json").read_text())
    return found


class Learner:
    def __init__(self, run: RunHandle, folder: Path, epoch: int, name: str | None) -> None:
        self._run = run
        self._folder = folder
        self._epoch = epoch
        self._step = int(name.split("-")[0]) if name else 0
        self._history = read(folder, name) if name else []

    async def learn(self) -> None:
        taken = 0
        groups = self._run.groups(epoch=self._epoch, auto_ack=False, prefetch=2, ttl_s=6)
        async with aclosing(groups):
            async for group in groups:
                try:
                    await group.ack()
                except LeaseLost:  # expired while the server was away: it comes again
                    continue
                self._history += [
                    rollout.rollout.id
                    for rollout in group.rollouts
                    if rollout.rollout.state is RolloutState.COMPLETED
                ]
                taken += 1
                if taken % GROUPS_PER_CHECKPOINT == 0:
                    await self._checkpoint()
        await self._checkpoint()

    async def _checkpoint(self) -> None:
        self._step += 1
        name = f"{self._step:06d}-{self._epoch:04d}"
        half = self._folder / f"{name}.half"
        half.write_text(json.dumps(self._history))
        half.rename(self._folder / f"{name}.json")
        await self._run.commit(name, epoch=self._epoch)


async def main(url: str, run_id: str, folder: Path) -> int:
    async with Client(url) as client:
        try:
            run = await client.run(run_id)
            while True:
                try:
                    start = await run.resume_from(checkpoints(folder))
                    break
                except (Unavailable, QueueFull):  # the server is away; a second rewind is only a newer epoch
                    await asyncio.sleep(0.2)
            (folder / f"started.{os.getpid()}").touch()
            name = start.checkpoint.name if start.checkpoint else None
            await Learner(run, folder, start.epoch, name).learn()
        except StaleEpoch:
            return FENCED
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
