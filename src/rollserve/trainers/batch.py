"""Samples to padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollserve.records.sample import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """B samples padded on the right to length L.

    ``ids`` int64 [B, L]; ``attention`` bool [B, L], True on real tokens; ``loss_mask`` bool [B, L];
    ``old_logprobs`` float32 [B, L], of the sampled distribution; ``versions`` int64 [B, L], -1 where
    not sampled; ``advantages`` float32 [B]; ``rollout`` int64 [B], equal for samples of one rollout.
    """

    ids: torch.Tensor
    attention: torch.Tensor
    loss_mask: torch.Tensor
    old_logprobs: torch.Tensor
    versions: torch.Tensor
    advantages: torch.Tensor
    rollout: torch.Tensor

    def __len__(self) -> int:
        return int(self.ids.shape[0])


def pad_batch(
    samples: Sequence[Sample], advantages: Sequence[float], *, pad_id: int = 0, device: str = "cpu"
) -> Batch:
    """Raises ``ValueError`` on a sample that is not exact: it has no loss mask to train on; and on one whose
    model saw images: a batch is ids alone."""
    if any(not sample.exact for sample in samples):
        raise ValueError("a text-only sample can't be trained token by token")
    if any(sample.images for sample in samples):
        raise ValueError("a sample with images can't be trained by its ids alone")
    length = max(len(sample.ids) for sample in samples)

    def padded(name: str, fill: float, dtype: type) -> torch.Tensor:
        out: NDArray[Any] = np.full((len(samples), length), fill, dtype=dtype)
        for row, sample in enumerate(samples):
            values = getattr(sample, name)
            out[row, : len(values)] = values
        return torch.from_numpy(out).to(device)

    lengths = torch.tensor([len(sample.ids) for sample in samples], device=device)
    order: dict[str, int] = {}
    rollout = [order.setdefault(sample.rollout_id, len(order)) for sample in samples]
    return Batch(
        ids=padded("ids", pad_id, np.int64),
        attention=torch.arange(length, device=device)[None, :] < lengths[:, None],
        loss_mask=padded("loss_mask", 0, np.bool_),
        old_logprobs=padded("logprobs", 0.0, np.float32),
        versions=padded("versions", -1, np.int64),
        advantages=torch.tensor(list(advantages), dtype=torch.float32, device=device),
        rollout=torch.tensor(rollout, device=device),
    )
