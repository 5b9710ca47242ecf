"""One request while it is being served. No torch, no clock, no thread: only what has been sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Literal

from rollserve.localserver.request import SamplingParams, VersionSpan

FinishReason = Literal["stop", "length", "abort"]


@dataclass(eq=False, slots=True)
class Sequence:
    """Prompt, settings and everything sampled so far.

    ``limit`` is the most tokens it may sample; ``eos_ids`` end it with a null ``stop_reason``,
    ``params.stop_token_ids`` with their id. ``prompt_logprobs``, where they are asked for, are of each
    prompt token but the first. ``spans`` says under which weights each token was sampled.
    A ``streamed`` sequence is reported after each step, another one only at its end.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    limit: int
    eos_ids: frozenset[int] = frozenset()
    streamed: bool = False
    rng: Random = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        self.rng = Random(self.params.seed)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """Tokens in prompt and answer together."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def last_id(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt_ids[-1]

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.eos_ids.union(self.params.stop_token_ids or ())

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be one that ends the answer."""
        return len(self.token_ids) >= self.params.min_tokens

    def append(self, token_id: int, logprob: float, rank: int, version: str) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.ranks.append(rank)
        self._mark(version)
        if token_id in self.eos_ids:
            self.finish_reason = "stop"
        elif token_id in (self.params.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token_id
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"

    def abort(self, failure: str | None = None) -> None:
        """End it with what has been sampled; with ``failure`` the request is answered by an error."""
        self.finish_reason, self.failure = "abort", failure

    def _mark(self, version: str) -> None:
        end = len(self.token_ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = end
        else:
            self.spans.append(VersionSpan(version, end - 1, end))


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step added to a sequence: ``token_ids[start:]`` and so on; copied, so that it can cross
    threads. ``spans`` are those of the added tokens, in the last report of a sequence those of all."""

    sequence: Sequence
    start: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    spans: list[VersionSpan]
    finish_reason: FinishReason | None
    stop_reason: int | None

    @staticmethod
    def since(sequence: Sequence, start: int) -> Progress:
        shown = 0 if sequence.done else start
        spans = [VersionSpan(s.version, max(s.start, shown), s.end) for s in sequence.spans if s.end > shown]
        return Progress(
            sequence=sequence,
            start=start,
            token_ids=sequence.token_ids[start:],
            logprobs=sequence.logprobs[start:],
            ranks=sequence.ranks[start:],
            spans=spans,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
