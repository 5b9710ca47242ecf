"""What sandboxes leave that come and go under random kills: ``.venv/bin/python bench/sandbox_churn.py``.

Two workers start and stop sandboxes, eight at once each. One is killed (SIGKILL) every few seconds with
whatever it is at, and another takes its place; the other is left alone, so that its memory and descriptors
can be watched from its first batches to its end. Below both, processes picked at random are killed all the
time: shells, what runs in them, what starts a sandbox or holds it. Then what is left is counted. Exit code 1
when something is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollserve.errors import SandboxError
from rollserve.sandbox import processes
from rollserve.sandbox.base import Sandbox, SandboxSpec
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.cgroups import CGROUPS
from rollserve.testing.runtime_probes import processes_with_environment

MARK = "ROLLSERVE_BENCH_CHURN"
"""In the environment of all that is started here."""

TTL_S = 3600.0
AT_ONCE = 8
LIVES_S = (3.0, 15.0)
KILL_EVERY_S = 0.25
WARM_BATCHES = 10
"""Until code and pools are loaded."""


# -- a worker ---------------------------------------------------------------------------------


async def work(folder: Path, count: int) -> None:
    """A line a sandbox, and one a batch of how the worker does. It ends when its stdout is gone."""
    runtime = BubblewrapRuntime(data_dir=folder)
    await runtime.reap()
    spec = SandboxSpec(env={MARK: os.environ[MARK]}, files={"f": b"x"})

    async def one() -> str:
        try:
            box = await runtime.create(spec, owner="churn", ttl_s=TTL_S)
        except SandboxError:
            return "not started"
        try:
            await use(box)
        except SandboxError:
            return "killed"
        finally:
            await box.close()
        return "used"

    for _ in range(0, count, AT_ONCE):
        for ended in await asyncio.gather(*(one() for _ in range(AT_ONCE))):
            print(ended)
        print("vitals", f"{rss_mb():.1f}", len(os.listdir("/proc/self/fd")), flush=True)
    await runtime.close()


async def use(box: Sandbox) -> None:
    """A command; with daemons that would outlive it, or given up in the middle."""
    chance = random.random()
    if chance < 0.3:
        await box.exec("(setsid sleep 300 &); (setsid sh -c 'trap : TERM; sleep 300' &)")
    elif chance < 0.5:
        await box.exec(
            "sleep 300 & sleep 300 & head -c 1000000 /dev/zero > big; cp big /tmp/; cd /; rm -r /etc"
        )
    elif chance < 0.7:
        command = asyncio.create_task(box.exec("sleep 5"))
        await asyncio.sleep(0.001)
        command.cancel()
        with suppress(asyncio.CancelledError):
            await command
    else:
        await box.exec("cat f")


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# -- what looks on, and kills -----------------------------------------------------------------


@dataclass
class Churn:
    """``ended`` counts sandboxes by how they ended, ``vitals`` are RSS in MiB and descriptors of the worker
    that is left alone, a batch each."""

    folder: Path
    count: int
    mark: str = field(default_factory=lambda: uuid4().hex)
    ended: Counter[str] = field(default_factory=Counter)
    vitals: list[tuple[float, int]] = field(default_factory=list)
    workers: set[int] = field(default_factory=set)
    killed_workers: list[int] = field(default_factory=list)
    killed_processes: int = 0

    @property
    def left(self) -> int:
        return self.count - self.ended.total()

    async def run(self) -> None:
        killer = asyncio.create_task(self._kill())
        watch = asyncio.create_task(self._watch())
        await asyncio.gather(self._worker(None), self._short_lives())
        killer.cancel()
        watch.cancel()
        await asyncio.gather(killer, watch, return_exceptions=True)

    async def _short_lives(self) -> None:
        while self.left > 0:
            await self._worker(random.uniform(*LIVES_S))

    async def _worker(self, live_s: float | None) -> None:
        """Until all is done by either, or for ``live_s``; then it is killed. Raises ``RuntimeError`` when it
        ends by itself."""
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--work", str(self.count), "--folder", str(self.folder)),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, MARK: self.mark},
        )
        assert worker.stdout is not None
        self.workers.add(worker.pid)
        alarm = asyncio.get_running_loop().call_later(live_s or 10 * TTL_S, worker.kill)
        async for line in worker.stdout:
            self._hear(line.decode().split(), alone=live_s is None)
            if self.left <= 0:
                worker.kill()
                break
        alarm.cancel()
        self.workers.discard(worker.pid)
        if await worker.wait() != -signal.SIGKILL:
            raise RuntimeError(f"a worker ended with {worker.returncode}")
        self.killed_workers.append(worker.pid)

    def _hear(self, words: list[str], *, alone: bool) -> None:
        if words[0] != "vitals":
            self.ended[" ".join(words)] += 1
        elif alone:
            self.vitals.append((float(words[1]), int(words[2])))

    async def _kill(self) -> None:
        """Something below a worker: of a sandbox, or of what makes it."""
        while True:
            await asyncio.sleep(random.uniform(0, 2 * KILL_EVERY_S))
            below = [pid for each in list(self.workers) for pid in processes.descendants(each, since_ticks=0)]
            if below:
                with suppress(ProcessLookupError):
                    os.kill(random.choice(below), signal.SIGKILL)
                    self.killed_processes += 1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(30)
            print(
                f"{self.ended.total()} of {self.count}, {len(self.killed_workers)} workers killed", flush=True
            )


def mounts() -> int:
    return Path("/proc/self/mounts").read_text().count("\n")


def namespaces(pids: list[int]) -> int:
    """Mount namespaces of these that are not ours: a mount lives as long as one of them."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/mnt"))
    return len(found - {os.readlink("/proc/self/ns/mnt")})


def control_groups(workers: list[int]) -> int:
    """Those of workers, which are named by their pids, and of their sandboxes."""
    found = 0
    for place in CGROUPS.glob("**/rollserve-*"):
        if place.name.split("-")[1] in map(str, workers):
            found += 1 + sum(each.is_dir() for each in place.iterdir())
    return found


def files(folder: Path) -> int:
    """But for the empty folder of the runtime."""
    return sum(path != folder / "bubblewrap" for path in folder.rglob("*"))


def growth(values: list[float]) -> tuple[float, float]:
    """Medians of the first and the last fifth."""
    fifth = max(1, len(values) // 5)
    return statistics.median(values[:fifth]), statistics.median(values[-fifth:])


async def measure(folder: Path, count: int) -> dict[str, Any]:
    mounts_before, begun = mounts(), time.perf_counter()
    own_before = len(os.listdir("/proc/self/fd"))
    churn = Churn(folder, count)
    await churn.run()
    taken_s = time.perf_counter() - begun
    runtime = BubblewrapRuntime(data_dir=folder)
    reaped = await runtime.reap()
    await runtime.close()
    marked = processes_with_environment(f"{MARK}={churn.mark}")
    warm = churn.vitals[WARM_BATCHES:]
    return {
        "sandboxes": churn.ended.total(),
        "ended": dict(churn.ended),
        "seconds": round(taken_s),
        "killed": {"workers": len(churn.killed_workers), "processes": churn.killed_processes},
        "reaped_at_the_end": reaped,
        "left": {
            "processes": len(marked),
            "mount namespaces": namespaces(marked),
            "control groups": control_groups(churn.killed_workers),
            "mounts": mounts() - mounts_before,
            "files and folders": files(folder),
            "descriptors": len(os.listdir("/proc/self/fd")) - own_before,
        },
        "one worker": {
            "batches": len(churn.vitals),
            "rss_mib": growth([rss for rss, _ in warm]) if warm else None,
            "descriptors": growth([float(each) for _, each in warm]) if warm else None,
        },
    }


def clean(result: dict[str, Any]) -> bool:
    """Nothing is left, and the worker that was left alone did not grow by a tenth, nor hold more descriptors
    than a batch in flight may."""
    (rss, rss_end), (open_, open_end) = result["one worker"]["rss_mib"], result["one worker"]["descriptors"]
    return not any(result["left"].values()) and rss_end < 1.1 * rss and open_end <= open_ + AT_ONCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--json", type=Path, help="write what was found to this file too")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        asyncio.run(work(arguments.folder, arguments.work))
        return
    with tempfile.TemporaryDirectory(prefix="rollserve-churn-") as name:
        os.chmod(name, 0o755)
        result = asyncio.run(measure(Path(name), arguments.count))
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    sys.exit(0 if clean(result) else 1)


if __name__ == "__main__":
    main()
