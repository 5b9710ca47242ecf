"""A readable GRPO trainer: from finished groups to one gradient step.

Group-relative advantages (arXiv:2402.03300), token-level importance correction with the logprobs the
service recorded when the token was sampled, a clipped ratio with separate bounds (arXiv:2503.14476),
and an explicit normaliser: the loss is a mean over trained tokens, or over rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from rollserve.records.sample import Sample
from rollserve.trainers.advantages import group_advantages
from rollserve.trainers.batch import Batch, pad_batch

Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(ids [B, L], attention [B, L]) -> logits [B, L, V]``."""


class GradedGroup(Protocol):
    """What a step needs of a group (``client.FinishedGroup`` is one)."""

    @property
    def rewards(self) -> list[float | None]: ...

    @property
    def samples(self) -> list[Sample]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """``clip_low`` and ``clip_high`` bound the importance ratio to [1 - low, 1 + high].
    ``normalise``: ``tokens`` weighs each trained token alike, ``rollouts`` each rollout. ``temperature``
    must be the run's: logprobs are compared under it. ``micro_batch`` samples go through the model at
    once. ``train_alike``: groups whose rewards are all alike go through it too, with advantage 0; this
    teaches nothing and is what a trainer pays that does not look."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    normalise: Literal["tokens", "rollouts"] = "tokens"
    scale_advantages: bool = True
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    micro_batch: int = 64
    max_staleness: int | None = None
    train_alike: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Of one step. ``groups_skipped`` had nothing to learn from. ``staleness`` is the policy version less
    that of a token, mean and max over trained tokens. ``ratio_error`` is the largest |log ratio| seen."""

    groups: int
    groups_skipped: int
    samples: int
    tokens: int
    loss: float
    reward_mean: float
    clip_share: float
    grad_norm: float
    ratio_error: float
    staleness_mean: float
    staleness_max: int
    tokens_too_stale: int


def token_logprobs(
    logits: Logits, ids: torch.Tensor, attention: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Log probability of each token given those before it: float32 [B, L], 0 at position 0. Under
    ``temperature`` 0 (greedy) the model's plain distribution is used."""
    scores = logits(ids, attention)[:, :-1].float()
    if temperature not in (0.0, 1.0):
        scores = scores / temperature
    chosen = torch.gather(scores, 2, ids[:, 1:, None]).squeeze(2)
    out = chosen - torch.logsumexp(scores, dim=2)
    return torch.cat([torch.zeros_like(out[:, :1]), out], dim=1)


def token_weights(batch: Batch, mask: torch.Tensor, normalise: str) -> torch.Tensor:
    """Weight of each trained token, summing to 1 over the batch: float32 [B, L]."""
    weights = mask.float()
    if normalise == "tokens":
        return weights / weights.sum().clamp(min=1)
    per_sample = weights.sum(dim=1)
    per_rollout = torch.zeros(int(batch.rollout.max()) + 1, device=weights.device)
    per_rollout = per_rollout.index_add(0, batch.rollout, per_sample)
    counted = int((per_rollout > 0).sum())
    return weights / per_rollout[batch.rollout].clamp(min=1)[:, None] / max(1, counted)


def clipped_objective(
    logprobs: torch.Tensor, batch: Batch, config: GRPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token loss [B, L] and whether the clip was active [B, L]."""
    ratio = torch.exp((logprobs - batch.old_logprobs).clamp(-20, 20))
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    advantage = batch.advantages[:, None]
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    return -gain, (ratio * advantage) > (clipped * advantage)


class GRPOTrainer:
    """Holds a model and its optimizer; ``step`` consumes groups. ``version`` is the policy version of
    the parameters and grows by one with each step that changed them."""

    def __init__(
        self,
        logits: Logits,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        config: GRPOConfig | None = None,
        *,
        version: int = 0,
        device: str = "cpu",
    ) -> None:
        self._logits = logits
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self.config = config or GRPOConfig()
        self.version = version
        self._device = device

    def step(self, groups: Sequence[GradedGroup]) -> StepStats | None:
        """One optimizer step on ``groups``; None when no group had anything to learn from."""
        samples, advantages, skipped = self._learnable(groups)
        if not samples:
            return None
        batch = pad_batch(samples, advantages, device=self._device)
        mask, too_stale = self._fresh(batch)
        weights = token_weights(batch, mask, self.config.normalise)
        self._optimizer.zero_grad(set_to_none=True)
        loss, clip_share, ratio_error = self._backward(batch, mask, weights)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        self._optimizer.step()
        ages = (self.version - batch.versions)[mask].float()
        graded = [r for group in groups for r in group.rewards if r is not None]
        self.version += 1
        return StepStats(
            groups=len(groups),
            groups_skipped=skipped,
            samples=len(samples),
            tokens=int(mask.sum()),
            loss=loss,
            reward_mean=sum(graded) / max(1, len(graded)),
            clip_share=clip_share,
            grad_norm=float(norm),
            ratio_error=ratio_error,
            staleness_mean=float(ages.mean()) if ages.numel() else 0.0,
            staleness_max=int(ages.max()) if ages.numel() else 0,
            tokens_too_stale=too_stale,
        )

    def _learnable(self, groups: Sequence[GradedGroup]) -> tuple[list[Sample], list[float], int]:
        """Exact samples of graded rollouts in groups whose rewards differ, with their advantages. Left
        out are samples whose model saw images (this trainer reads ids alone), and another policy's."""
        samples: list[Sample] = []
        advantages: list[float] = []
        skipped = 0
        for group in groups:
            values = group_advantages(group.rewards, scale=self.config.scale_advantages)
            if values is None:
                skipped += 1
                if not self.config.train_alike:
                    continue
                values = [None if reward is None else 0.0 for reward in group.rewards]
            for sample in group.samples:
                value = values[sample.rollout_index]
                ours = sample.exact and not sample.images and not sample.policy
                trained = ours and sample.loss_mask.any()
                if trained and value is not None:
                    samples.append(sample)
                    advantages.append(value)
        return samples, advantages, skipped

    def _fresh(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """The loss mask without tokens older than ``max_staleness`` versions."""
        if self.config.max_staleness is None:
            return batch.loss_mask, 0
        fresh = batch.loss_mask & (batch.versions >= self.version - self.config.max_staleness)
        return fresh, int((batch.loss_mask & ~fresh).sum())

    def _backward(
        self, batch: Batch, mask: torch.Tensor, weights: torch.Tensor
    ) -> tuple[float, float, float]:
        """Accumulate gradients over micro-batches; returns loss, clip share, largest |log ratio|."""
        loss_sum, clipped_sum, worst = 0.0, 0.0, 0.0
        for start in range(0, len(batch), self.config.micro_batch):
            rows = slice(start, start + self.config.micro_batch)
            part = Batch(**{name: getattr(batch, name)[rows] for name in Batch.__slots__})
            logprobs = token_logprobs(self._logits, part.ids, part.attention, self.config.temperature)
            losses, clipped = clipped_objective(logprobs, part, self.config)
            loss = (losses * weights[rows]).sum()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            loss_sum += float(loss.detach())
            clipped_sum += float((clipped & mask[rows]).sum())
            drift = (logprobs.detach() - part.old_logprobs).abs()[mask[rows]]
            worst = max(worst, float(drift.max()) if drift.numel() else 0.0)
        return loss_sum, clipped_sum / max(1, int(mask.sum())), worst
