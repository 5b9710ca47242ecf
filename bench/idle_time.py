"""How long does the trainer wait for rollouts? The service beside the best that its bound allows.

``python bench/idle_time.py [--steps 24] [--only 3:1] [--json]``, about half an hour for all of it.

A real server with real workers runs one-turn rollouts against a scripted engine whose replies take a second
on the average (all the same, or with a long tail), and a simulated trainer takes batches of 8 groups of 4,
"trains" (sleeps) and announces the next version. What the engine needs for a batch stands to what the
trainer needs as 1:1, 3:1 and 10:1. Ways of use: *synchronous*, *one-step-off* (the trainer submits a batch
when a step begins, for the step after it), and *asynchronous* with a task source and a bound on staleness.
The optimum is that of ``rollserve.testing.training_reference`` under the same bound and with the same reply
times, as many batches ahead as are best within the bound (over many seeds). Wall time is the subject
here: the machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rollserve import stopping
from rollserve.cli.processes import Processes
from rollserve.client import Client, FinishedGroup, RunHandle
from rollserve.client.delivery import lease
from rollserve.client.http import Transport
from rollserve.records.control import StalenessRule, TaskSource
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import Quota, SamplingSettings
from rollserve.records.task import GraderSpec, Limits, Task
from rollserve.testing.scripted import Reply, ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.testing.training_reference import Draw, Loop, Outcome, Use, simulate
from rollserve.tiny_tokenizer import TinyTokenizer
from rollserve.wire import CreatePolicy, LeaseGroups, OpenRun, RegisterBackend

GROUPS, ROLLOUTS, SLOTS = 8, 4, 16
MEAN_S = 1.0
BATCH_S = MEAN_S * GROUPS * ROLLOUTS / SLOTS
SIGMA = 1.0
"""Of the long tail, log-normal: one reply in a hundred takes over six times the mean."""
SKIP = 4
"""Steps until the loop is in its swing."""
RATIOS = {"1:1": 1.0, "3:1": 3.0, "10:1": 10.0}
USES: tuple[tuple[Use, int], ...] = (
    *(("synchronous", 0), ("one-step-off", 1)),
    *(("asynchronous", bound) for bound in (1, 2, 4, 8)),
)
TASK = Task(
    instruction="Say 42.",
    runtime="none",
    tools=["echo"],
    grader=GraderSpec(name="numeric", options={"answer": 42}),
    limits=Limits(max_turns=2),
)


def times(tail: bool, seed: int) -> Draw:
    """Seconds of each reply, ``MEAN_S`` on the average."""
    draw = random.Random(seed)
    if not tail:
        return lambda: MEAN_S
    return lambda: MEAN_S * draw.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)


@dataclass(frozen=True)
class Case:
    ratio: str
    tail: bool
    use: Use
    bound: int

    @property
    def loop(self) -> Loop:
        return Loop(
            use=self.use,
            groups=GROUPS,
            rollouts=ROLLOUTS,
            slots=SLOTS,
            update_s=BATCH_S / RATIOS[self.ratio],
            staleness=self.bound,
        )


def optimum(case: Case, steps: int, seed: int) -> Outcome:
    """With the reply times of ``seed``, and as many batches ahead as are best over many seeds."""

    def rate(window: int) -> float:
        loop = replace(case.loop, window=window)
        return median(simulate(loop, times(case.tail, each), steps).rate(SKIP) for each in range(31))

    windows = range(case.bound + 1) if case.use == "asynchronous" else range(1)
    return simulate(replace(case.loop, window=max(windows, key=rate)), times(case.tail, seed), steps)


class Trainer:
    """Takes a batch, sleeps, sets the next version."""

    def __init__(
        self, client: Client, transport: Transport, engine: ScriptedEngine, policy: str, case: Case
    ) -> None:
        self._client = client
        self._transport = transport
        self._engine = engine
        self._policy = policy
        self._case = case

    async def train(self, steps: int) -> tuple[Outcome, int]:
        """What it took, and the largest staleness met."""
        run = await self._open()
        ends, waits, oldest = [], [], 0
        begun = since = time.perf_counter()
        await self._submit(run)
        for step in range(steps):
            batch = await self._batch(run)
            waits.append(time.perf_counter() - since)
            if self._case.use == "one-step-off":
                await self._submit(run)
            oldest = max([oldest, *(r.staleness or 0 for group in batch for r in group.rollouts)])
            await asyncio.sleep(self._case.loop.update_s)
            self._engine.label = str(step + 1)
            await self._client.set_version(self._policy, step + 1, str(step + 1))
            since = time.perf_counter()
            ends.append(since - begun)
            if self._case.use == "synchronous":
                await self._submit(run)
        status = await run.status()
        await run.close()
        thrown = sum(each.count for name, each in status.bins.get("groups", {}).items() if name == "withheld")
        return Outcome(ends_s=tuple(ends), waits_s=tuple(waits), thrown=thrown), oldest

    async def _open(self) -> RunHandle:
        spec = OpenRun(
            policy=self._policy,
            sampling=SamplingSettings(max_tokens=64),
            quota=Quota(max_running_rollouts=4096, max_queued_groups=4096, max_undelivered_groups=4096),
        )
        if self._case.use == "asynchronous":
            bound = self._case.bound
            source = TaskSource(
                tasks=(TASK,), num_rollouts=ROLLOUTS, epochs=None, in_flight=(bound + 2) * GROUPS
            )
            rule = StalenessRule(max_staleness=bound, groups_per_version=GROUPS, on_stale="withhold")
            spec = spec.model_copy(update={"source": source, "staleness": rule})
        return await self._client.open_run(spec)

    async def _submit(self, run: RunHandle) -> None:
        if self._case.use != "asynchronous":
            await run.submit([TASK] * GROUPS, num_rollouts=ROLLOUTS)

    async def _batch(self, run: RunHandle) -> list[FinishedGroup]:
        batch: list[FinishedGroup] = []
        while len(batch) < GROUPS:
            body = LeaseGroups(max_groups=GROUPS - len(batch), wait_s=20.0)
            got = await lease(self._transport, run.id, body)
            if got:
                await got[0].ack()  # of the lease: all of them
            batch += got
        return batch


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[str]:
    """Its URL."""
    processes = Processes(folder / "logs")
    url = f"http://127.0.0.1:{processes.port()}"
    command = [
        *(sys.executable, "-m", "rollserve", "serve", "--port", url.rsplit(":", 1)[1]),
        *("--data-dir", str(folder / "data"), "--workers", "1", "--runtime", "none"),
        *("--set", f"workers.run_slots={SLOTS}", "--set", "backends.concurrency=off"),
    ]
    try:
        await processes.wait_ready(processes.start("server", command), f"{url}/readyz", 60)
        yield url
    finally:
        processes.stop()


async def measure(
    case: Case, steps: int, number: int, client: Client, transport: Transport
) -> dict[str, Any]:
    """One case against an engine of its own."""
    ids = tuple(TinyTokenizer().encode(" 42<|im_end|>"))
    seed = 1000 + number
    draw = times(case.tail, seed)
    engine = ScriptedEngine(lambda _: Reply(token_ids=ids, latency_s=draw()))
    async with serving(ScriptedApp(engine)) as url:
        policy = f"p{number}"
        renderer = RendererSpec(name="qwen3", options={"enable_thinking": False})
        await client.create_policy(
            CreatePolicy(name=policy, model="scripted", tokenizer="tiny", renderer=renderer)
        )
        backend = await client.register_backend(policy, RegisterBackend(url=url, kind=BackendKind.VLLM))
        outcome, oldest = await Trainer(client, transport, engine, policy, case).train(steps)
        await client.remove_backend(policy, backend.id)
    best = await asyncio.to_thread(optimum, case, steps, seed)
    return {
        "ratio": case.ratio,
        "tail": case.tail,
        "use": case.use,
        "bound": case.bound,
        "steps_per_s": round(outcome.rate(SKIP), 4),
        "optimum_steps_per_s": round(best.rate(SKIP), 4),
        "of_optimum": round(outcome.rate(SKIP) / best.rate(SKIP), 3),
        "trainer_idle": round(outcome.idle(SKIP), 3),
        "optimum_trainer_idle": round(best.idle(SKIP), 3),
        "staleness_max": oldest,
        "groups_too_old": outcome.thrown,
    }


def show(row: dict[str, Any]) -> None:
    tail = "long tail" if row["tail"] else "even"
    print(
        f"{row['ratio']:>5} {tail:10} {row['use']:13} bound {row['bound']}: idle {row['trainer_idle']:.3f}"
        f" (at best {row['optimum_trainer_idle']:.3f}), {row['steps_per_s']:.3f} steps/s,"
        f" {100 * row['of_optimum']:.1f} % of the optimum; staleness at most {row['staleness_max']}",
        flush=True,
    )


async def main(options: argparse.Namespace) -> None:
    ratios = [options.only] if options.only else list(RATIOS)
    cases = [Case(r, tail, use, bound) for r in ratios for tail in (False, True) for use, bound in USES]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rollserve-idle-") as folder:
        async with server(Path(folder)) as url, Client(url) as client:
            transport = Transport(url, None, timeout_s=120)
            for number, case in enumerate(cases):
                rows.append(await measure(case, options.steps, number, client, transport))
                if not options.json:
                    show(rows[-1])
            await transport.close()
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", choices=list(RATIOS))
    parser.add_argument("--json", action="store_true")
    stopping.end_as_interrupted()
    asyncio.run(main(parser.parse_args()))
