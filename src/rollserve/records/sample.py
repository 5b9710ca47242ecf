"""A sample: one root-to-leaf path of a trajectory, made trainable."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollserve.records.call import Float32, Int32
from rollserve.records.image import PlacedImage

MAX_REWARD = float(np.finfo(np.float32).max)


def is_reward(value: float) -> bool:
    """Whether training can use it: finite, also in the samples' float32 arrays."""
    return -MAX_REWARD <= value <= MAX_REWARD


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Arrays share the length L.

    * ``ids`` int32 [L]: what the model consumed and sampled, in order.
    * ``loss_mask`` bool [L]: True where the token was sampled by the policy and is trained here. A
      sampled prefix that several samples share is True in the first of them only.
    * ``logprobs`` float32 [L]: of the sampled distribution; 0 where not sampled.
    * ``versions`` int32 [L]: policy version of a sampled token (the low end where it was inferred);
      -1 elsewhere.
    * ``rewards`` float32 [L]: the reward at the last sampled token of the path, or per-call rewards at
      the last token of each call; 0 elsewhere. All zero when ``reward`` is None.
    * ``reward``: of the rollout, None where it has none.
    * ``weight``: 1 / (samples of the rollout by the same policy); ``index`` of ``count`` numbers all.
    * ``policy``: whose tokens and versions these are, where it is not the run's own; it was asked by a route
      that is trained.
    * ``extras``: the backend's opaque per-token arrays, by name, first axis L where the backend gives
      one row a token.
    * ``images``: what the model saw beside text, placed among the ids; their bytes are artifacts of the
      attempt (``image.artifact``), addresses left out. A model that is given the ids alone has not seen them.
    * ``exact``: False where ids are not those the model consumed; ``cause`` says why. ``text`` then
      holds the conversation.
    """

    rollout_id: str
    rollout_index: int
    index: int
    count: int
    weight: float
    ids: Int32
    loss_mask: NDArray[np.bool_]
    logprobs: Float32
    versions: Int32
    rewards: Float32
    reward: float | None
    exact: bool = True
    cause: str | None = None
    text: str | None = None
    truncated_by: str | None = None
    mixed_versions: bool = False
    inferred_versions: bool = False
    policy: str = ""
    call_ids: tuple[str, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    extras: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int | None:
        """Of the tokens trained here; None when there are none."""
        mask = self.loss_mask & (self.versions >= 0)
        return int(self.versions[mask].min()) if mask.any() else None


class LabelTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Of the calls of one label."""

    calls: int = 0
    sampled: int = 0
    trained: int = 0


class TokenReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a rollout's sampled tokens: ``sampled`` is ``trained`` and all of ``left_out`` (by
    reason). ``sequences`` hold them in ``tokens`` tokens; one for each call would have been ``calls``.
    """

    calls: int
    sequences: int
    sampled: int
    trained: int
    tokens: int
    left_out: dict[str, int]
    by_label: dict[str, LabelTokens]
