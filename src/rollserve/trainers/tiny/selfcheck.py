"""Does reinforcement learning climb from the warm start? GRPO against a simulated sandbox, in process.

The same tokens, sampler, task and trainer as in the demo; no service, no sandbox, no delay. Always on
policy: each step samples with the weights it then updates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from rollserve.localserver.engine import Engine
from rollserve.localserver.model import BatchModel
from rollserve.localserver.request import SamplingParams
from rollserve.localserver.sequence import Sequence as Sampled
from rollserve.records.sample import Sample
from rollserve.trainers.grpo import GRPOConfig, GRPOTrainer
from rollserve.trainers.tiny.rendering import Rendering
from rollserve.trainers.tiny.task import LookupTask, make_task, simulate

MAX_TURNS = 6
MAX_TOKENS = 24


@dataclass(slots=True)
class Episode:
    """One rollout: the tokens so far, which of them were sampled and their logprobs."""

    task: LookupTask
    ids: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float | None = None

    def take(self, sampled: Sampled, rendering: Rendering) -> None:
        """Append a turn; run its command, or grade its text."""
        prompt = self.ids
        self._pad(len(prompt))
        self.ids = prompt + sampled.token_ids
        self.mask += [True] * len(sampled.token_ids)
        self.logprobs += sampled.logprobs
        command, text = rendering.parse(sampled.token_ids)
        if command is None or sampled.finish_reason != "stop":
            self.reward = float(text.strip() == self.task["answer"])
            return
        output = simulate(command, self.task["files"])
        self.ids = rendering.extend(prompt, sampled.token_ids, output)
        self._pad(len(self.ids))

    def _pad(self, length: int) -> None:
        missing = length - len(self.mask)
        self.mask += [False] * missing
        self.logprobs += [0.0] * missing


@dataclass(frozen=True, slots=True)
class Group:
    """A task's rollouts, as the trainer wants them."""

    rewards: list[float | None]
    samples: list[Sample]


def run_episodes(engine: Engine, rendering: Rendering, tasks: Sequence[LookupTask]) -> list[Episode]:
    """Play one episode a task, all at once; those that never end get reward 0."""
    episodes = [Episode(task, rendering.prompt(task["instruction"])) for task in tasks]
    for _ in range(MAX_TURNS):
        live = [episode for episode in episodes if episode.reward is None]
        if not live:
            break
        turns = [_turn(episode, rendering.eos_id) for episode in live]
        for turn in turns:
            engine.submit(turn)
        while engine.has_work:
            engine.step()
        for episode, turn in zip(live, turns, strict=True):
            episode.take(turn, rendering)
    for episode in episodes:
        episode.reward = episode.reward or 0.0
    return episodes


def _turn(episode: Episode, eos_id: int) -> Sampled:
    return Sampled("", episode.ids, SamplingParams(), limit=MAX_TOKENS, eos_ids=frozenset([eos_id]))


def group(episodes: Sequence[Episode], version: int) -> Group:
    rewards = [episode.reward for episode in episodes]
    return Group(rewards, [_sample(episode, index, version) for index, episode in enumerate(episodes)])


def _sample(episode: Episode, index: int, version: int) -> Sample:
    mask = np.array(episode.mask)
    return Sample(
        rollout_id=str(index),
        rollout_index=index,
        index=0,
        count=1,
        weight=1.0,
        ids=np.array(episode.ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.array(episode.logprobs, dtype=np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        rewards=np.zeros(len(mask), dtype=np.float32),
        reward=episode.reward,
    )


@dataclass(frozen=True, slots=True)
class Check:
    """``learning_rate`` is Adam's; ``eval_tasks`` fresh tasks measure start and end."""

    steps: int = 80
    tasks: int = 8
    rollouts: int = 8
    learning_rate: float = 3e-4
    eval_tasks: int = 256


@dataclass(frozen=True, slots=True)
class Curve:
    """``rates[i]`` is the success rate of the rollouts of step ``i``."""

    start: float
    end: float
    rates: list[float]
    seconds: float
    largest_log_ratio: float


def learn(
    model: Qwen3ForCausalLM,
    check: Check = Check(),
    *,
    seed: int = 0,
    report: Callable[[int, float], None] | None = None,
) -> Curve:
    """Train ``model`` in place; returns how it went."""
    rendering, rng = Rendering(), Random(seed)
    engine = Engine(BatchModel(model, max_batch=check.tasks * check.rollouts))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=check.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    trainer = GRPOTrainer(
        lambda ids, attention: model(input_ids=ids, use_cache=False).logits,
        list(model.parameters()),
        optimizer,
        GRPOConfig(),
    )
    start = success_rate(engine, rendering, check.eval_tasks, seed)
    began, rates, worst = time.monotonic(), [], 0.0
    for step in range(check.steps):
        tasks = [make_task(rng) for _ in range(check.tasks)]
        episodes = run_episodes(engine, rendering, [task for task in tasks for _ in range(check.rollouts)])
        played = [episodes[i : i + check.rollouts] for i in range(0, len(episodes), check.rollouts)]
        stats = trainer.step([group(rollouts, trainer.version) for rollouts in played])
        worst = max(worst, stats.ratio_error if stats else 0.0)
        rates.append(float(np.mean([episode.reward for episode in episodes])))
        if report is not None:
            report(step + 1, rates[-1])
    seconds = time.monotonic() - began
    return Curve(start, success_rate(engine, rendering, check.eval_tasks, seed), rates, seconds, worst)


def success_rate(engine: Engine, rendering: Rendering, tasks: int, seed: int) -> float:
    """Of one rollout each on tasks that training has not seen."""
    rng = Random(f"fresh {seed}")
    episodes = run_episodes(engine, rendering, [make_task(rng) for _ in range(tasks)])
    return float(np.mean([episode.reward for episode in episodes]))
