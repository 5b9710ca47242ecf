"""Supervised training on the mixture of demonstrations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from rollserve.trainers.tiny.demonstrations import Demonstrations, Mixture
from rollserve.trainers.tiny.model import ModelSize, make_model, token_logprobs
from rollserve.trainers.tiny.rendering import Rendering
from rollserve.trainers.tiny.task import SHELL_TOOL


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The first ``skill_steps`` show only episodes that succeed: copying a key or a digit is learnt
    fastest where nothing is left to chance. The rest show the mixture."""

    steps: int = 240
    skill_steps: int = 150
    rows: int = 32
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    weight_decay: float = 0.01
    mixture: Mixture = field(default_factory=Mixture)
    size: ModelSize = field(default_factory=ModelSize)


def warm_start(
    settings: WarmStart = WarmStart(),
    *,
    seed: int = 0,
    tools: Sequence[dict[str, Any]] = (SHELL_TOOL,),
    report: Callable[[int, float, float], None] | None = None,
) -> Qwen3ForCausalLM:
    """Make a model and train it; the same for the same seed (and number of torch threads)."""
    model = make_model(settings.size, seed=seed)
    rendering = Rendering(tools)
    skill = Demonstrations(rendering, Mixture(0, 0, 0, 0, easy=settings.mixture.easy), seed)
    mixture = Demonstrations(rendering, settings.mixture, seed + 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay
    )
    started = time.monotonic()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(settings, step)
        source = skill if step < settings.skill_steps else mixture
        ids, mask = (torch.from_numpy(array) for array in source.batch(settings.rows))
        loss = -token_logprobs(model, ids, mask).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if report is not None:
            report(step + 1, loss.item(), time.monotonic() - started)
    torch.nn.Module.eval(model)
    return model


def _rate(settings: WarmStart, step: int) -> float:
    """Linear warm-up, then a cosine to a twentieth."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
