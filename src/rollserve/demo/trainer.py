"""The demo's trainer process: keeps groups in flight, learns from finished ones as they come.

It knows the rollserve server and the inference server by URL alone. What happens is written as JSON
lines to ``--progress``, one object an event, for whoever watches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollserve.client import Client, FinishedGroup, RunHandle
from rollserve.demo.left import TASK, TRAINED
from rollserve.demo.milestone import Milestone, first_good
from rollserve.demo.supply import Drawn, Submitted, Supply
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import SamplingSettings
from rollserve.records.task import AgentSpec, GraderSpec, Limits, Task
from rollserve.records.update import UpdateMode
from rollserve.trainers.grpo import GRPOConfig, GRPOTrainer, StepStats
from rollserve.trainers.tiny.model import save_model
from rollserve.trainers.tiny.task import LookupTask, Mix, make_task
from rollserve.trainers.weights import LocalWeights, VllmWeights, WeightSync
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to train. ``off_policy_groups`` is how many groups are in flight beyond one step's, where the
    trainer submits them (without ``dynamic_sampling``). ``mix``: train on tasks of mixed difficulty; success
    is still measured on those that can be learnt. ``train_all``: on groups that teach nothing too.
    ``milestone``: a success rate; say at the end what it took to reach it."""

    server: str
    backend: str
    kind: BackendKind
    model_dir: Path
    progress: Path
    seed: int = 0
    steps: int = 100
    groups_per_step: int = 8
    rollouts: int = 8
    off_policy_groups: int = 8
    eval_tasks: int = 200
    learning_rate: float = 4e-4
    stop_at: float = 0.95
    runtime: str | None = None
    dynamic_sampling: bool = False
    mix: bool = False
    train_all: bool = False
    milestone: float | None = None

    @property
    def output(self) -> Path:
        return self.model_dir.parent


class Progress:
    """Appends JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")

    def close(self) -> None:
        self._file.close()


def demo_task(made: LookupTask, runtime: str | None) -> Task:
    """As the service takes it: the answer is only to be found in the sandbox."""
    return Task(
        instruction=made["instruction"],
        files=made["files"],
        runtime=runtime,
        agent=AgentSpec(name="tool"),
        tools=["shell"],
        grader=GraderSpec(name="exact", options={"answer": made["answer"]}),
        limits=Limits(max_turns=5, run_s=60, command_s=10),
    )


@dataclass
class Totals:
    rollouts: int = 0
    tokens: int = 0
    trained: int = 0
    waited_s: float = 0.0
    busy_s: float = 0.0
    gradient_cpu_s: float = 0.0
    started: float = 0.0
    started_cpu_s: float = 0.0
    rewards: list[float] = field(default_factory=list)


class Training:
    """One training run from the first evaluation to the last."""

    def __init__(self, plan: Plan, client: Client, progress: Progress) -> None:
        self._plan = plan
        self._client = client
        self._progress = progress
        self._rng = random.Random(plan.seed)
        self._eval_rng = random.Random(f"eval-{plan.seed}")
        self._model = AutoModelForCausalLM.from_pretrained(plan.model_dir, dtype=torch.float32)
        self._model.train()
        parameters = list(self._model.parameters())
        self._trainer = GRPOTrainer(
            lambda ids, attention: self._model(input_ids=ids, attention_mask=attention).logits,
            parameters,
            torch.optim.Adam(parameters, lr=plan.learning_rate),
            GRPOConfig(train_alike=plan.train_all),
        )
        weights = plan.output / "weights"
        self._sync: WeightSync = (
            VllmWeights(plan.backend, weights)
            if plan.kind is BackendKind.VLLM
            else LocalWeights(plan.backend, weights)
        )
        self._totals = Totals()
        self._supply = self._make_supply()
        self._marks: list[Milestone] = []

    def _make_supply(self) -> Supply:
        plan = self._plan

        def make() -> Task:
            made = Mix().draw(self._rng) if plan.mix else make_task(self._rng)
            return demo_task(made, plan.runtime)

        if plan.dynamic_sampling:
            return Drawn(make, groups=plan.groups_per_step, rollouts=plan.rollouts, seed=plan.seed)
        groups, ahead = plan.groups_per_step, plan.off_policy_groups
        return Submitted(make, groups=groups, ahead=ahead, rollouts=plan.rollouts)

    async def run(self) -> None:
        await self._client.create_policy(
            CreatePolicy(
                name="demo",
                model="demo",
                tokenizer=str(self._plan.model_dir.absolute()),
                renderer=RendererSpec(name="qwen3", options={"enable_thinking": False}),
            )
        )
        backend = RegisterBackend(url=self._plan.backend, kind=self._plan.kind)
        await self._client.register_backend("demo", backend)
        await self._push(0)
        start = await self._evaluate("start")
        await self._train()
        end = await self._evaluate("end")
        await asyncio.to_thread(self._leave)
        if self._plan.milestone is not None:
            await self._look_back(self._plan.milestone)
        self._progress.write("done", success_rate_start=start, success_rate_end=end)

    def _leave(self) -> None:
        """What it has become, as the local server takes it, and a task to try it on."""
        save_model(self._model, self._plan.output / TRAINED)
        made = make_task(random.Random(f"try-{self._plan.seed}"))
        task = demo_task(made, self._plan.runtime)
        (self._plan.output / TASK).write_text(task.model_dump_json(indent=2, exclude_defaults=True) + "\n")

    async def _look_back(self, rate: float) -> None:
        """Which version was the first that was right so often, and what it took to get there. The same fresh
        tasks are asked of each."""

        async def measure(mark: Milestone) -> float:
            self._model.load_state_dict(mark.weights)
            self._trainer.version += 1
            await self._push(self._trainer.version)
            self._eval_rng = random.Random(f"milestone-{self._plan.seed}")
            return await self._evaluate(f"version {mark.version}")

        found = await first_good(self._marks, rate, measure)
        self._progress.write("milestone", rate=rate, **({} if found is None else found.facts()))

    async def _open(self, name: str, **settings: Any) -> RunHandle:
        sampling = SamplingSettings(temperature=1.0, max_tokens=48)
        return await self._client.open_run(OpenRun(policy="demo", name=name, sampling=sampling, **settings))

    async def _evaluate(self, when: str) -> float:
        """Success rate on fresh tasks, one rollout each, under the policy as it is now."""
        run = await self._open(f"eval-{when.replace(' ', '-')}")
        made = [make_task(self._eval_rng) for _ in range(self._plan.eval_tasks)]
        tasks = [demo_task(each, self._plan.runtime) for each in made]
        await run.submit(tasks, num_rollouts=1)
        rewards: list[float] = []
        ended = 0
        async with aclosing(run.groups(prefetch=16)) as groups:
            async for group in groups:
                rewards += [reward for reward in group.rewards if reward is not None]
                ended += len(group.rewards)
                if ended >= len(tasks):
                    await group.ack()
                    break
                self._progress.write("eval", when=when, done=len(rewards), of=len(tasks))
        await run.close()
        rate = sum(rewards) / max(1, len(rewards))
        self._progress.write("evaluated", when=when, success_rate=rate, rollouts=len(rewards))
        return rate

    async def _train(self) -> None:
        run = await self._open("train", **self._supply.settings)
        started = self._totals.started = time.time()
        self._totals.started_cpu_s = time.process_time()
        self._progress.write("train", run_id=run.id)
        await self._supply.begin(run)
        async with aclosing(run.groups(prefetch=self._plan.groups_per_step)) as groups:
            for step in range(1, self._plan.steps + 1):
                batch = await self._collect(groups)
                reached = await self._step(step, batch, await self._supply.took(run, batch))
                await self._remember(run, step)
                if reached:
                    break
        await run.close()
        self._progress.write(
            "trained",
            train_seconds=time.time() - started,
            waited_s=self._totals.waited_s,
            busy_s=self._totals.busy_s,
            cpu_s=time.process_time() - self._totals.started_cpu_s,
            rollouts=self._totals.rollouts,
            tokens=self._totals.tokens,
            version=self._trainer.version,
        )

    async def _collect(self, groups: AsyncGenerator[FinishedGroup, None]) -> list[FinishedGroup]:
        """The next step's groups."""
        batch: list[FinishedGroup] = []
        waiting = time.perf_counter()
        while len(batch) < self._plan.groups_per_step:
            batch.append(await anext(groups))
        self._totals.waited_s += time.perf_counter() - waiting
        return batch

    async def _push(self, version: int) -> float:
        """The model's weights as ``version``, while calls in flight stand still; seconds they stood."""
        async with self._client.updating("demo", mode=UpdateMode.KEEP, lease_s=120) as update:
            began = time.perf_counter()
            await self._sync.push(self._model.state_dict(), version)
            await update.commit(version, canary=self._logprobs(update.canary_ids))
        return time.perf_counter() - began

    @torch.no_grad()
    def _logprobs(self, ids: list[int]) -> list[float]:
        """Of each but the first, at temperature 1."""
        logits = self._model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:]).unsqueeze(-1))
        values: list[float] = chosen.squeeze(-1).tolist()
        return values

    async def _step(self, step: int, batch: list[FinishedGroup], reward: float) -> bool:
        """One gradient step, then new weights to the backend; True when the target is reached."""
        began = time.time()
        stats = await asyncio.to_thread(self._gradient_step, batch)
        stepped = time.time()
        pushed_s = 0.0
        if stats is not None:
            pushed_s = await self._push(self._trainer.version)
        self._totals.busy_s += time.time() - began
        self._totals.trained += 0 if stats is None else stats.groups - stats.groups_skipped
        self._totals.rewards.append(reward)
        self._totals.rollouts += sum(len(group.rollouts) for group in batch)
        self._totals.tokens += sum(int(s.loss_mask.sum()) for group in batch for s in group.samples)
        self._progress.write(
            "step",
            step=step,
            began=began,
            stepped=stepped,
            pushed_s=pushed_s,
            reward=reward,
            version=self._trainer.version,
            waited_s=self._totals.waited_s,
            rollouts=self._totals.rollouts,
            tokens=self._totals.tokens,
            stats=None if stats is None else asdict(stats),
            example=batch[0].rollouts[0].rollout.id,
        )
        recent = self._totals.rewards[-5:]
        return len(recent) == 5 and sum(recent) / 5 >= self._plan.stop_at

    def _gradient_step(self, batch: list[FinishedGroup]) -> StepStats | None:
        began = time.thread_time()
        stats = self._trainer.step(batch)
        self._totals.gradient_cpu_s += time.thread_time() - began
        return stats

    async def _remember(self, run: RunHandle, step: int) -> None:
        """What it has come to, for ``_look_back``."""
        if self._plan.milestone is None:
            return
        seconds, cpu_s = time.time() - self._totals.started, time.process_time() - self._totals.started_cpu_s
        sampled = (await run.status()).bins.get("tokens", {}).values()
        weights = {name: value.detach().clone() for name, value in self._model.state_dict().items()}
        self._marks.append(
            Milestone(
                version=self._trainer.version,
                step=step,
                busy_s=self._totals.busy_s,
                gradient_cpu_s=self._totals.gradient_cpu_s,
                cpu_s=cpu_s,
                seconds=seconds,
                rollouts=sum(each.count for each in sampled),
                tokens=sum(each.tokens for each in sampled),
                trained=self._totals.trained,
                weights=weights,
            )
        )


def parse(arguments: list[str] | None = None) -> Plan:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--kind", type=BackendKind, default=BackendKind.LOCAL)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--progress", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--runtime", default=None)
    parser.add_argument("--dynamic-sampling", action="store_true")
    parser.add_argument("--mix", action="store_true")
    parser.add_argument("--train-all", action="store_true")
    parser.add_argument("--milestone", type=float, default=None)
    return Plan(**vars(parser.parse_args(arguments)))


async def main(plan: Plan) -> None:
    torch.manual_seed(plan.seed)
    torch.set_num_threads(1)
    progress = Progress(plan.progress)
    try:
        async with Client(plan.server) as client:
            await Training(plan, client, progress).run()
    finally:
        progress.close()


if __name__ == "__main__":
    asyncio.run(main(parse()))
