from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollserve.records.image import Image, PlacedImage
from rollserve.records.sample import Sample
from rollserve.trainers.advantages import group_advantages
from rollserve.trainers.batch import pad_batch
from rollserve.trainers.grpo import GRPOConfig, GRPOTrainer, clipped_objective, token_logprobs, token_weights

VOCABULARY = 6


def make_sample(ids: list[int], trained: list[int], *, rollout: int = 0, version: int = 0) -> Sample:
    mask = np.array([1 if i in trained else 0 for i in range(len(ids))], dtype=np.bool_)
    return Sample(
        rollout_id=f"rol_{rollout}",
        rollout_index=rollout,
        index=0,
        count=1,
        weight=1.0,
        ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -math.log(VOCABULARY), 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        rewards=np.zeros(len(ids), dtype=np.float32),
        reward=None,
    )


class Group:
    def __init__(self, rewards: list[float | None], samples: list[Sample]) -> None:
        self.rewards = rewards
        self.samples = samples


class Bigram(torch.nn.Module):
    """Logits of the next token from the last one: uniform at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))

    def forward(self, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


def trainer_of(model: Bigram, **config: Any) -> GRPOTrainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return GRPOTrainer(model, list(model.parameters()), optimizer, GRPOConfig(**config))


def test_advantages_are_relative_to_the_group() -> None:
    values = group_advantages([1.0, 0.0, 0.0, 1.0])
    assert values == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-4)


def test_a_rollout_without_reward_has_no_part_in_the_statistics() -> None:
    assert group_advantages([1.0, None, 0.0]) == [
        pytest.approx(1.0, abs=1e-4),
        None,
        pytest.approx(-1.0, abs=1e-4),
    ]
    assert group_advantages([1.0, 0.0], scale=False) == [0.5, -0.5]


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, None], [0.5, 0.5, 0.5], [None, None]])
def test_a_group_with_nothing_to_learn_is_skipped(rewards: list[float | None]) -> None:
    assert group_advantages(rewards) is None


def test_a_trainer_that_does_not_look_pays_for_groups_that_teach_nothing() -> None:
    alike = Group([1.0, 1.0], [make_sample([0, 1], [1], rollout=each) for each in range(2)])
    model = Bigram()
    assert trainer_of(model).step([alike]) is None
    stats = trainer_of(model, train_alike=True).step([alike])
    assert stats is not None
    assert (stats.groups, stats.groups_skipped, stats.samples) == (1, 1, 2)
    assert float(model.table.detach().abs().max()) == 0.0


def test_token_logprobs_are_those_of_the_model() -> None:
    model = Bigram()
    with torch.no_grad():
        model.table[2, 3] = 1.0
    ids = torch.tensor([[2, 3, 1]])
    got = token_logprobs(model, ids, torch.ones_like(ids, dtype=torch.bool))
    want = 1.0 - math.log(math.e + VOCABULARY - 1)
    assert got[0].tolist() == pytest.approx([0.0, want, -math.log(VOCABULARY)], abs=1e-6)
    hot = token_logprobs(model, ids, torch.ones_like(ids, dtype=torch.bool), temperature=0.5)
    assert float(hot[0, 1].detach()) == pytest.approx(2.0 - math.log(math.e**2 + VOCABULARY - 1), abs=1e-6)


def test_padding_does_not_reach_mask_or_loss() -> None:
    batch = pad_batch([make_sample([1, 2, 3], [2]), make_sample([1], [])], [1.0, -1.0])
    assert batch.ids.shape == (2, 3)
    assert batch.attention.tolist() == [[True, True, True], [True, False, False]]
    assert batch.loss_mask.sum() == 1


def test_a_text_only_sample_is_refused() -> None:
    sample = make_sample([1, 2], [1])
    inexact = Sample(**{name: getattr(sample, name) for name in Sample.__slots__} | {"exact": False})
    with pytest.raises(ValueError, match="text-only"):
        pad_batch([inexact], [1.0])


def test_a_sample_whose_model_saw_images_is_not_trained_by_its_ids() -> None:
    image = PlacedImage(image=Image(digest="d"), start=0, end=1, exact=True)
    one, two = (replace(make_sample([1, 2], [1], rollout=each), images=(image,)) for each in range(2))
    with pytest.raises(ValueError, match="images"):
        pad_batch([one], [1.0])
    assert trainer_of(Bigram()).step([Group([1.0, 0.0], [one, two])]) is None


def test_weights_sum_to_one_by_token_and_by_rollout() -> None:
    samples = [
        make_sample([0, 1, 2, 3], [1, 2, 3], rollout=0),
        make_sample([0, 1], [1], rollout=1),
        make_sample([0, 2], [1], rollout=1),
    ]
    batch = pad_batch(samples, [1.0, 1.0, 1.0])
    by_token = token_weights(batch, batch.loss_mask, "tokens")
    by_rollout = token_weights(batch, batch.loss_mask, "rollouts")
    assert float(by_token.sum()) == pytest.approx(1.0)
    assert by_token[batch.loss_mask].tolist() == pytest.approx([0.2] * 5)
    assert float(by_rollout[0].sum()) == pytest.approx(0.5)
    assert float(by_rollout[1:].sum()) == pytest.approx(0.5)


def test_clip_stops_the_gain_and_keeps_the_penalty() -> None:
    config = GRPOConfig(clip_low=0.2, clip_high=0.2)
    batch = pad_batch([make_sample([0, 1], [1], rollout=0), make_sample([0, 1], [1], rollout=1)], [1.0, -1.0])
    doubled = batch.old_logprobs + math.log(2.0)
    losses, clipped = clipped_objective(doubled, batch, config)
    assert losses[:, 1].tolist() == pytest.approx([-1.2, 2.0])
    assert clipped[:, 1].tolist() == [True, False]


def test_a_step_makes_the_rewarded_token_likelier_and_the_other_less() -> None:
    model = Bigram()
    trainer = trainer_of(model)
    good, bad = make_sample([0, 4], [1], rollout=0), make_sample([0, 5], [1], rollout=1)
    stats = trainer.step([Group([1.0, 0.0], [good, bad])])
    assert stats is not None
    assert stats.tokens == 2
    assert stats.ratio_error < 1e-6
    assert model.table[0, 4] > 0 > model.table[0, 5]
    assert trainer.version == 1


def test_micro_batches_change_nothing() -> None:
    samples = [make_sample([0, 1 + i % 4, 2, 3], [1, 3], rollout=i) for i in range(6)]
    rewards: list[float | None] = [float(i % 2) for i in range(6)]
    whole, parts = Bigram(), Bigram()
    trainer_of(whole).step([Group(rewards, samples)])
    trainer_of(parts, micro_batch=2).step([Group(rewards, samples)])
    assert torch.allclose(whole.table, parts.table, atol=1e-7)


def test_a_step_without_signal_changes_nothing() -> None:
    model = Bigram()
    trainer = trainer_of(model)
    samples = [make_sample([0, 1], [1], rollout=0), make_sample([0, 2], [1], rollout=1)]
    assert trainer.step([Group([1.0, 1.0], samples)]) is None
    assert trainer.version == 0
    assert not model.table.detach().any()


def test_stale_tokens_are_masked_and_counted() -> None:
    model = Bigram()
    trainer = trainer_of(model, max_staleness=1)
    trainer.version = 5
    samples = [
        make_sample([0, 1], [1], rollout=0, version=5),
        make_sample([0, 2], [1], rollout=1, version=2),
    ]
    stats = trainer.step([Group([1.0, 0.0], samples)])
    assert stats is not None
    assert stats.tokens_too_stale == 1
    assert stats.tokens == 1
    assert stats.staleness_max == 0
