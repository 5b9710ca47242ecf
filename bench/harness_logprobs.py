"""Sampler against scorer on what real harnesses make of a real (tiny, random) model.

``python bench/harness_logprobs.py --from FOLDER [NAME…]`` (``./scripts/harnesses`` fills the folder). The
local server samples from a Qwen3 of random weights; each harness asks it in a sandbox, as it asks any model;
then each sample is scored again, by prompt logprobs. A wrong template, or ids that were tokenized again,
would show as a number. What a random model says is no tool call: episodes are short, and end when the
harness has had enough.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollserve.cli.processes import Processes, free_port
from rollserve.client import Client
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import RetrySettings, SamplingSettings
from rollserve.records.task import AgentSpec, GraderSpec, Limits, Task
from rollserve.testing.harness_trial import service
from rollserve.trainers.tiny.model import ModelSize, make_model, save_model
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend

POLICY = "random"
NAMES = ("pi", "mini-swe-agent", "codex")
CONTEXT_TOKENS = 40_000
SCORE_S = 600.0
"""Codex's prompt alone is 16,000 of these tokens."""


@dataclass(kw_only=True)
class Scores:
    """``mean`` and ``largest`` are of |recorded - scored| over ``compared`` trained tokens."""

    name: str
    calls: int = 0
    samples: int = 0
    compared: int = 0
    total: float = 0.0
    largest: float = 0.0
    wrong: int = 0

    def row(self) -> str:
        mean = f"{self.total / self.compared:.1e}" if self.compared else "-"
        cells = (self.name, self.calls, self.samples, self.compared, mean, f"{self.largest:.1e}", self.wrong)
        return f"| {' | '.join(map(str, cells))} |"


@asynccontextmanager
async def local_server(folder: Path) -> AsyncIterator[str]:
    """Its URL; the model lies in ``folder / "model"``."""
    await asyncio.to_thread(save_model, make_model(ModelSize(context=CONTEXT_TOKENS)), folder / "model")
    port, processes = free_port(), Processes(folder / "model-logs")
    command = [
        *(sys.executable, "-m", "rollserve.localserver", "--model", str(folder / "model")),
        *("--port", str(port), "--max-batch", "2", "--threads", "2"),
    ]
    try:
        url = f"http://127.0.0.1:{port}"
        await processes.wait_ready(processes.start("model", command), f"{url}/health", 120)
        yield url
    finally:
        processes.stop()


def asking_task(name: str) -> Task:
    return Task(
        instruction="Write alpha to notes.txt.",
        agent=AgentSpec(name=name, options={"provide": "mount", "context_tokens": CONTEXT_TOKENS}),
        tools=[],
        grader=GraderSpec(name="command", options={"command": "true"}),
        limits=Limits(run_s=150, memory_mb=16384, processes=1024, max_turns=4),
    )


async def scores_of(client: Client, name: str, rollouts: int) -> Scores:
    # Codex takes an answer that was cut off for a fault: it ends by itself, after some hundred tokens.
    sampling = SamplingSettings(temperature=1.0, max_tokens=4096)
    run = await client.open_run(
        OpenRun(policy=POLICY, sampling=sampling, retry=RetrySettings(max_attempts=1))
    )
    await run.submit([asking_task(name)], num_rollouts=rollouts)
    async with aclosing(run.groups(auto_ack=False)) as groups:
        group = await anext(groups)
        await group.ack()
    found = Scores(name=name)
    for finished in group.rollouts:
        found.calls += len((await client.trajectory(finished.rollout.id))["calls"])
        checked = await client.verify(finished.rollout.id, score=True)
        found.wrong += not checked.ok
        for sample in checked.samples:
            found.samples += 1
            if (difference := sample.difference) is not None:
                found.compared += difference.compared
                found.total += difference.mean * difference.compared
                found.largest = max(found.largest, difference.max)
    return found


async def measure(names: Sequence[str], harnesses: Path, rollouts: int) -> None:
    sys.stdout.write("| harness | calls | samples | tokens | mean | max | rollouts with a finding |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- | --- |\n")
    with tempfile.TemporaryDirectory(prefix="rollserve-logprobs-") as made:
        folder = Path(made)
        async with (
            local_server(folder) as backend,
            service(harnesses, folder) as url,
            Client(url, timeout_s=SCORE_S) as client,
        ):
            renderer = RendererSpec(name="qwen3", options={"enable_thinking": False})
            tokenizer = str(folder / "model")
            await client.create_policy(
                CreatePolicy(name=POLICY, model="model", tokenizer=tokenizer, renderer=renderer)
            )
            await client.register_backend(POLICY, RegisterBackend(url=backend, kind=BackendKind.VLLM))
            for name in names:
                sys.stdout.write(f"{(await scores_of(client, name, rollouts)).row()}\n")
                sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES), help="of harnesses")
    parser.add_argument("--from", dest="folder", type=Path, required=True, help="the installed harnesses")
    parser.add_argument("--rollouts", type=int, default=2, help="of each (default: %(default)s)")
    options = parser.parse_args()
    asyncio.run(measure(options.names, options.folder.absolute(), options.rollouts))


if __name__ == "__main__":
    main()
