"""Samples made anew from what was stored of a run, by other settings than it had."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollserve.records.base import Record
from rollserve.records.call import Label
from rollserve.records.control import StalenessRule
from rollserve.records.policy import MAX_VERSION


class ExportSettings(Record):
    """What is None is as the run has it. ``sequences``: the fewest that hold each trained token once, or one
    for each of the ``calls`` (its prompt whole, what it sampled trained). ``on_inexact`` ``fail`` leaves out
    rollouts that are not token-exact as a whole. ``staleness`` is reckoned at ``version``, the policy's of
    now where None; without it nothing is too old. Rewards are those of ``regrade``, where given.

    ``thinking`` and ``rewrites`` of a run shaped what its model was shown: they can't be changed
    afterwards."""

    train_labels: Annotated[tuple[Label, ...] | None, Field(max_length=6)] = None
    on_inexact: Literal["drop", "text", "fail"] | None = None
    sequences: Literal["fewest", "calls"] = "fewest"
    staleness: StalenessRule | None = None
    version: Annotated[int | None, Field(ge=0, le=MAX_VERSION)] = None
    regrade: Annotated[str | None, Field(min_length=1, max_length=160)] = None
