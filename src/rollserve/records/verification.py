"""What looking at a rollout's samples again found: whether they are whole, and whether a model that serves
the same weights gives their tokens the same probability."""

from __future__ import annotations

from typing import Literal

from rollserve.records.base import Record

Check = Literal[
    "arrays", "ids", "mask", "spans", "logprobs", "versions", "weights", "round_trip", "reply", "difference"
]


class Finding(Record):
    """Something that is wrong. ``at`` is an index into the sample's arrays, where there is one."""

    check: Check
    detail: str
    at: int | None = None


class Difference(Record):
    """|recorded − scored| logprob over ``compared`` trained tokens. ``at`` (index in the sample),
    ``token_id``, ``text``, ``recorded`` and ``scored`` are of the largest one. ``skipped`` counts trained
    tokens that can't be compared, by reason."""

    backend_id: str
    version: int
    compared: int
    mean: float = 0.0
    max: float = 0.0
    at: int | None = None
    token_id: int | None = None
    text: str = ""
    recorded: float = 0.0
    scored: float = 0.0
    skipped: dict[str, int] = {}


class SampleCheck(Record):
    """``respelled`` counts stretches whose text, encoded again, gives other ids with the same text: models
    sample such, and it is no fault. ``not_scored`` says why there is no ``difference``."""

    index: int
    tokens: int
    trained: int
    respelled: int = 0
    findings: list[Finding] = []
    difference: Difference | None = None
    not_scored: str | None = None


class Verification(Record):
    """``note`` says why there are no samples to look at."""

    rollout_id: str
    samples: list[SampleCheck]
    findings: list[Finding] = []
    note: str | None = None

    @property
    def ok(self) -> bool:
        """Nothing is wrong. What could not be scored is not wrong."""
        return not self.note and not self.findings and not any(each.findings for each in self.samples)
