"""What are balancing, stickiness, waiting for home, the bound on calls and the early stop worth?

``python bench/ablations.py [--rounds 3] [--only NAME …] [--json]``, about 45 seconds a case and round.

A real server with a real worker, and three simulated engines behind it (``rollserve.testing.engine_model``:
speeds 3 to 2 to 1, throughput that saturates, a key-value cache with prefixes and preemption). Episodes have
several turns and a long tail; a simulated trainer takes four informative groups of four for each version,
which the server draws from a task source of which about half are worth training. Each case is the whole
system less one setting. Counted over a window after a warm-up: what the engines did, by themselves, and what
the trainer got. Ratios are to the whole system of the same round; wall time is the subject here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rollserve import stopping
from rollserve.cli.processes import Processes
from rollserve.client import Client, RunHandle
from rollserve.client.delivery import lease
from rollserve.client.http import Transport
from rollserve.records.control import FilterRule, StalenessRule, TaskSource
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import Quota, SamplingSettings
from rollserve.records.task import GraderSpec, Limits, Task
from rollserve.testing.engine_model import Machine, ModelledEngine, modelled_app
from rollserve.testing.scripted import Reply
from rollserve.testing.scripted_server import serving
from rollserve.tiny_tokenizer import TinyTokenizer
from rollserve.wire import CreatePolicy, LeaseGroups, OpenRun, RegisterBackend

MACHINES = (
    Machine(peak=3000, half=4, cache_tokens=16_000),
    Machine(peak=2000, half=4, cache_tokens=16_000),
    Machine(peak=1000, half=4, cache_tokens=16_000),
)
ROLLOUTS = 4
UPDATE_S = 0.3
KINDS = {"mixed": 0.5, "easy": 1.0, "hard": 0.0}
"""How often a task of that kind is done right. Half are mixed."""

SETTINGS = {
    "backends.routing": "sticky",
    "backends.outlier_ratio": "0",
    "backends.canary": "false",
    "backends.slow_start_s": "0",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    Case(name="whole system"),
    Case(name="no balancing", settings={"backends.routing": "in_turn"}),
    Case(name="no stickiness", settings={"backends.routing": "least_busy"}),
    Case(name="no waiting for home", settings={"backends.read_cost": "0"}),
    Case(name="no bound on concurrency", settings={"backends.concurrency": "off"}),
    Case(name="no early stop", source={"carry_over": True}),
)

# ── episodes


class Episodes:
    """The policy: it writes down where it is, so that its next turn knows from the prompt alone."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = TinyTokenizer()
        self._filler = self._tokenizer.encode(" the file is not found;")

    def script(self, prompt_ids: list[int]) -> Reply:
        text = self._tokenizer.decode(prompt_ids[-120:])
        if places := re.findall(r"turn (\d+) of (\d+) (\w+)", text):
            turn, turns, fate = int(places[-1][0]) + 1, int(places[-1][1]), places[-1][2]
        else:
            kind = (re.findall(r"kind (\w+)", text) or ["easy"])[-1]  # probes are of no kind
            turn, turns = 1, min(24, 1 + round(self._rng.lognormvariate(0.9, 0.8)))
            fate = "right" if self._rng.random() < KINDS[kind] else "wrong"
        return self._say(turn, turns, fate)

    def _say(self, turn: int, turns: int, fate: str) -> Reply:
        if turn >= turns:
            said = f" {42 if fate == 'right' else 13}<|im_end|>"
        else:
            call = json.dumps({"name": "echo", "arguments": {"text": f"turn {turn} of {turns} {fate}"}})
            said = f"\n<tool_call>\n{call}\n</tool_call><|im_end|>"
        end = self._tokenizer.encode(said)
        length = min(160, round(self._rng.lognormvariate(3.4, 0.6))) if turn < turns else 4
        padding = (self._filler * (length // len(self._filler) + 1))[:length]
        return Reply(token_ids=(*padding, *end))


def tasks() -> tuple[Task, ...]:
    """With a long instruction, no two alike from their beginning on."""
    rng = random.Random(0)
    kinds = ("mixed", "easy", "mixed", "hard")

    def task(number: int) -> Task:
        noise = " ".join(f"{rng.randrange(10_000)}" for _ in range(140))
        return Task(
            instruction=f"Task {number}: {noise}. It is of the kind {kinds[number % 4]}.",
            runtime="none",
            tools=["echo"],
            grader=GraderSpec(name="numeric", options={"answer": 42}),
            limits=Limits(max_turns=30),
        )

    return tuple(task(number) for number in range(200))


# ── the loop


@dataclass(slots=True)
class Seen:
    """At one moment, since the start; ``tokens`` are those of groups that the trainer got."""

    at: float
    groups: int = 0
    tokens: int = 0
    episodes: float = 0.0
    worked: float = 0.0
    sampled: float = 0.0
    prompt: int = 0
    hits: int = 0
    preemptions: int = 0


class Loop:
    """A trainer that takes its groups, sleeps, and sets the next version."""

    def __init__(
        self, client: Client, transport: Transport, engines: list[ModelledEngine], groups: int
    ) -> None:
        self._client = client
        self._wanted = groups
        self._transport = transport
        self._engines = engines
        self._groups = self._tokens = 0

    async def train(self, run: RunHandle) -> None:
        """Until cancelled."""
        version = 0
        while True:
            got = 0
            while got < self._wanted:
                batch = await lease(
                    self._transport, run.id, LeaseGroups(max_groups=self._wanted - got, wait_s=20.0)
                )
                if batch:
                    await batch[0].ack()  # of the lease: all of them
                got += len(batch)
                self._groups += len(batch)
                self._tokens += sum(int(s.loss_mask.sum()) for group in batch for s in group.samples)
            await asyncio.sleep(UPDATE_S)
            version += 1
            for engine in self._engines:
                engine.label = str(version)
            await self._client.set_version("p", version, str(version))

    async def look(self) -> Seen:
        status = await self._client.status()
        models = [engine.simulation for engine in self._engines]
        return Seen(
            at=time.perf_counter(),
            groups=self._groups,
            tokens=self._tokens,
            episodes=status.counters.get("episodes", 0.0),
            worked=sum(model.worked for model in models),
            sampled=sum(model.sampled for model in models),
            prompt=sum(model.prompt_tokens for model in models),
            hits=sum(model.hit_tokens for model in models),
            preemptions=sum(model.preemptions for model in models),
        )


def figures(one: Seen, two: Seen) -> dict[str, float]:
    seconds = two.at - one.at
    sampled = two.sampled - one.sampled
    peak = sum(machine.peak for machine in MACHINES)
    return {
        "informative_groups_per_s": (two.groups - one.groups) / seconds,
        "rollouts_per_s": (two.episodes - one.episodes) / seconds,
        "sampled_tokens_per_s": sampled / seconds,
        "engine_use": (two.worked - one.worked) / peak / seconds,
        "prefix_hits": (two.hits - one.hits) / max(1, two.prompt - one.prompt),
        "wasted_tokens": 1 - (two.tokens - one.tokens) / max(1.0, sampled),
        "preemptions_per_s": (two.preemptions - one.preemptions) / seconds,
    }


def opening(case: Case, options: argparse.Namespace) -> OpenRun:
    source: dict[str, Any] = {
        "num_rollouts": ROLLOUTS,
        "epochs": None,
        "shuffle_seed": 0,
        "target_groups": options.groups,
        "extra_groups": 2 * options.groups,
        "in_flight": 5 * options.groups,
    }
    return OpenRun(
        policy="p",
        sampling=SamplingSettings(max_tokens=512),
        quota=Quota(max_running_rollouts=options.sessions),
        source=TaskSource(tasks=tasks(), **(source | dict(case.source))),
        filters=(FilterRule(name="zero_variance"),),
        staleness=StalenessRule(max_staleness=options.staleness, on_stale="withhold"),
    )


@asynccontextmanager
async def server(folder: Path, settings: Mapping[str, str]) -> AsyncIterator[str]:
    """Its URL."""
    processes = Processes(folder / "logs")
    url = f"http://127.0.0.1:{processes.port()}"
    command = [
        *(sys.executable, "-m", "rollserve", "serve", "--port", url.rsplit(":", 1)[1]),
        *("--data-dir", str(folder / "data"), "--workers", "1", "--runtime", "none"),
    ]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    try:
        await processes.wait_ready(processes.start("server", command), f"{url}/readyz", 60)
        yield url
    finally:
        processes.stop()


async def measure(case: Case, options: argparse.Namespace, seed: int) -> dict[str, float]:
    episodes = Episodes(seed)
    machines = [replace(machine, cache_tokens=options.cache_tokens) for machine in MACHINES]
    settings = {**SETTINGS, "workers.run_slots": str(options.sessions)}
    settings |= {"backends.concurrency": options.concurrency, **case.settings}
    engines = [ModelledEngine(episodes.script, machine) for machine in machines]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollserve-ablations-"))
        urls = [await stack.enter_async_context(serving(modelled_app(engine))) for engine in engines]
        url = await stack.enter_async_context(server(Path(folder), settings))
        client = await stack.enter_async_context(Client(url))
        transport = Transport(url, None, timeout_s=120)
        stack.push_async_callback(transport.close)
        renderer = RendererSpec(name="qwen3", options={"enable_thinking": False})
        spec = CreatePolicy(name="p", model="scripted", tokenizer="tiny", renderer=renderer)
        await client.create_policy(spec)
        for each in urls:
            await client.register_backend("p", RegisterBackend(url=each, kind=BackendKind.VLLM))
        loop = Loop(client, transport, engines, options.groups)
        run = await client.open_run(opening(case, options))
        training = asyncio.create_task(loop.train(run))
        try:
            await asyncio.wait({training}, timeout=options.warm_up_s)
            before = await loop.look()
            await asyncio.wait({training}, timeout=options.window_s)
            return figures(before, await loop.look())
        finally:
            training.cancel()
            await asyncio.wait({training})
            await run.close()


async def main(options: argparse.Namespace) -> None:
    cases = [case for case in CASES if not options.only or case.name in (CASES[0].name, *options.only)]
    rows: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    for round_ in range(options.rounds):
        turn = round_ % len(cases)
        for case in (*cases[turn:], *cases[:turn]):  # so that none is always the first
            rows[case.name].append(await measure(case, options, round_))
            if not options.json:
                print(round_, case.name, {n: round(v, 3) for n, v in rows[case.name][-1].items()}, flush=True)
    whole = rows[CASES[0].name]
    table = {}
    for name, rounds in rows.items():
        table[name] = {each: round(median(row[each] for row in rounds), 3) for each in rounds[0]}
        for each in ("informative_groups_per_s", "rollouts_per_s", "sampled_tokens_per_s", "engine_use"):
            ratios = [row[each] / base[each] for row, base in zip(rounds, whole, strict=True) if base[each]]
            table[name][f"{each}_ratio"] = round(median(ratios), 3)
    for name, row in () if options.json else table.items():
        print(f"{name:24}", row)
    if options.json:
        print(json.dumps({"medians": table, "rounds": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--warm-up-s", type=float, default=18.0)
    parser.add_argument("--window-s", type=float, default=24.0)
    parser.add_argument("--sessions", type=int, default=48, help="rollouts that run at once")
    parser.add_argument("--groups", type=int, default=4, help="informative groups of a version")
    parser.add_argument("--cache-tokens", type=int, default=16_000, help="of each engine")
    parser.add_argument("--concurrency", default="auto", help="calls on an engine at once: auto, or a number")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    stopping.end_as_interrupted()
    asyncio.run(main(parser.parse_args()))
