"""``rollserve bench``: N concurrent episodes of T turns against the scripted backend.

Server and workers run as in real life, as processes of their own; the scripted backend is one more,
and its CPU time is left out. What is measured is read from ``/proc`` and from the server's status.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollserve.cli.output import err, out, print_json
from rollserve.cli.proc import Usage, rss_mb, running, tree_usage
from rollserve.cli.processes import Processes, Running
from rollserve.client import Client, FinishedGroup, RunHandle
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import Quota, SamplingSettings
from rollserve.records.task import GraderSpec, Limits, Task
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend

WARM_UP_EPISODES = 8
SAMPLE_EVERY_S = 0.25
WORKER_MODULE = "rollserve.build.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    episodes: int
    turns: int
    tokens: int
    latency_ms: float
    workers: int
    runtime: str
    rounds: int


@dataclass(slots=True)
class Round:
    """One round of all episodes."""

    episodes: int = 0
    calls: int = 0
    tokens: int = 0
    lost: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    lags_ms: list[float] = field(default_factory=list)
    server_rss_mb: float = 0.0
    workers_rss_mb: float = 0.0


def _task(plan: BenchPlan) -> Task:
    return Task(
        instruction="Echo what you are told, then finish.",
        runtime=plan.runtime,
        tools=["echo"] if plan.runtime == "none" else ["shell"],
        grader=GraderSpec(name="numeric", options={"answer": 42}),
        limits=Limits(max_turns=plan.turns + 1),
    )


class Bench:
    """The processes of one benchmark, and what they cost."""

    def __init__(self, plan: BenchPlan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._processes = Processes(folder / "logs")
        self._server_url = f"http://127.0.0.1:{self._processes.port()}"
        self._backend_url = f"http://127.0.0.1:{self._processes.port()}"

    async def run(self, progress: Progress) -> dict[str, Any]:
        try:
            backend = self._start_backend()
            server = self._start_server()
            await self._processes.wait_ready(backend, f"{self._backend_url}/health", 60)
            await self._processes.wait_ready(server, f"{self._server_url}/readyz", 60)
            async with Client(self._server_url) as client:
                await self._prepare(client)
                await self._round(client, server, WARM_UP_EPISODES, progress)
                rounds = [
                    await self._round(client, server, self._plan.episodes, progress)
                    for _ in range(self._plan.rounds)
                ]
                return self._report(rounds, tree_usage(server.process.pid))
        finally:
            self._processes.stop()

    def _start_backend(self) -> Running:
        plan = self._plan
        tool = (
            ("echo", '{"text": "ping"}') if plan.runtime == "none" else ("shell", '{"command": "echo ping"}')
        )
        command = [
            *(sys.executable, "-m", "rollserve.testing.scripted_server"),
            *("--port", self._backend_url.rsplit(":", 1)[1], "--latency-ms", str(plan.latency_ms)),
            *("--tokens", str(plan.tokens), "--turns", str(plan.turns)),
            *("--tool", tool[0], "--arguments", tool[1], "--final-text", "42", "--model", "scripted"),
        ]
        return self._processes.start("scripted-backend", command)

    def _start_server(self) -> Running:
        plan = self._plan
        slots = -(-plan.episodes // plan.workers)
        command = [
            *(sys.executable, "-m", "rollserve", "serve"),
            *("--port", self._server_url.rsplit(":", 1)[1], "--data-dir", str(self._folder / "data")),
            *("--workers", str(plan.workers), "--runtime", plan.runtime),
            *("--set", f"workers.run_slots={slots}", "--set", f"workers.grade_slots={slots}"),
            *("--set", "backends.concurrency=off"),  # the scripted backend takes any number at once
        ]
        return self._processes.start("server", command)

    async def _prepare(self, client: Client) -> None:
        renderer = RendererSpec(name="qwen3", options={"enable_thinking": False})
        await client.create_policy(
            CreatePolicy(name="bench", model="scripted", tokenizer="tiny", renderer=renderer)
        )
        await client.register_backend("bench", RegisterBackend(url=self._backend_url, kind=BackendKind.VLLM))

    async def _round(self, client: Client, server: Running, episodes: int, progress: Progress) -> Round:
        spec = OpenRun(
            policy="bench",
            sampling=SamplingSettings(max_tokens=self._plan.tokens),
            quota=Quota(max_running_rollouts=max(1, episodes), max_queued_groups=max(1, episodes)),
        )
        run = await client.open_run(spec)
        result = Round()
        before = tree_usage(server.process.pid)
        started = time.perf_counter()
        watching = asyncio.create_task(self._watch(client, result))
        try:
            await run.submit([_task(self._plan)] * episodes, num_rollouts=1)
            await self._consume(run, episodes, result, progress)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        result.wall_s = time.perf_counter() - started
        result.cpu_s = tree_usage(server.process.pid).cpu_s - before.cpu_s
        result.lost = episodes - result.episodes
        await run.close()
        await run.prune()
        self._weigh(server.process.pid, result)
        return result

    def _weigh(self, server_pid: int, result: Round) -> None:
        """What is resident with nothing in flight: over the rounds it shows what is not given back."""
        result.server_rss_mb = rss_mb(server_pid)
        result.workers_rss_mb = sum(rss_mb(pid) for pid in running(server_pid, WORKER_MODULE))

    async def _watch(self, client: Client, result: Round) -> None:
        while True:
            result.lags_ms.append((await client.status()).loop_lag_ms_p99)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def _consume(self, run: RunHandle, episodes: int, result: Round, progress: Progress) -> None:
        bar = progress.add_task(f"{episodes} episodes", total=episodes)
        seen = 0
        async with aclosing(run.groups(prefetch=64, auto_ack=False)) as groups:
            while seen < episodes:
                group = await anext(groups)
                await group.ack()
                seen += 1
                self._count(group, result)
                progress.advance(bar)

    def _count(self, group: FinishedGroup, result: Round) -> None:
        """An episode counts when it was graded right and every token of every turn is there."""
        sampled = sum(int(sample.loss_mask.sum()) for sample in group.samples)
        calls = sum(len(sample.call_ids) for sample in group.samples)
        result.calls += calls
        result.tokens += sampled
        if group.rewards == [1.0] and calls == self._plan.turns:
            result.episodes += 1

    def _report(self, rounds: list[Round], usage: Usage) -> dict[str, Any]:
        plan = self._plan
        return {
            "episodes": min(item.episodes for item in rounds),
            "lost": sum(item.lost for item in rounds),
            "concurrent": plan.episodes,
            "turns": plan.turns,
            "rounds": plan.rounds,
            "tokens_per_call": round(sum(r.tokens for r in rounds) / max(1, sum(r.calls for r in rounds)), 1),
            "episodes_per_s": round(median(item.episodes / item.wall_s for item in rounds), 2),
            "calls_per_s": round(median(item.calls / item.wall_s for item in rounds), 1),
            "cpu_ms_per_call": round(median(1000 * r.cpu_s / max(1, r.calls) for r in rounds), 3),
            "loop_lag_ms_p99": round(median(max(r.lags_ms, default=0.0) for r in rounds), 2),
            "rss_mb_peak": round(usage.rss_peak_mb, 1),
            "rss_mb_by_round": {
                "server": [round(item.server_rss_mb, 1) for item in rounds],
                "workers": [round(item.workers_rss_mb, 1) for item in rounds],
            },
            "processes": usage.processes,
            "workers": plan.workers,
            "runtime": plan.runtime,
        }


async def bench(plan: BenchPlan, *, as_json: bool) -> int:
    """Exit code 1 when an episode was lost."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="rollserve-bench-") as folder,
        Progress(*columns, console=err, disable=as_json) as progress,
    ):
        report = await Bench(plan, Path(folder)).run(progress)
    if as_json:
        print_json(report)
    else:
        for name, value in report.items():
            out.print(f"{name:18} {value}")
    return int(report["lost"] > 0)
