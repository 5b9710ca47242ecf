"""Pieces of an answer → one ``Generation``, checked: no more ids than were asked for, each of which can
be a token's, has a logprob and, where versions are reported, exactly one of them. An answer that lacks
its evidence is an error, never a guess."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rollserve.backend.base import Generation, LabelSpan, TextSink, TokenSink, Usage
from rollserve.backend.saying import Said, Saying
from rollserve.errors import BackendError, BackendUnavailable

NO_EVIDENCE_LOGPROB = -9999.0
"""vLLM writes this where it has no logprob, and clamps to it: no sampled token can have it."""

MAX_ID = 2**31 - 1
"""Ids rest and travel as int32."""

_Reason: TypeAlias = Literal["stop", "length", "abort"]
_REASONS: tuple[_Reason, ...] = ("stop", "length", "abort")


@dataclass(slots=True)
class Piece:
    """What one body or one event of a stream held. ``spans`` are ``(start, end, label)`` as sent; ``said``
    is set where the engine reads the answer itself."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    prompt_ids: list[int] | None = None
    spans: list[tuple[int, int, str]] | None = None
    extras: dict[str, bytes] = field(default_factory=dict)
    said: Said | None = None
    usage: Usage | None = None


class Assembly:
    """``max_tokens`` is how many were asked for, ``hear`` who wants the text as it comes."""

    def __init__(
        self,
        operation: str = "backend.generate",
        max_tokens: int | None = None,
        hear: TextSink | None = None,
    ) -> None:
        self._operation = operation
        self._max_tokens = max_tokens
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[tuple[int, int, str]] | None = None
        self._prompt_ids: list[int] | None = None
        self._finish: str | None = None
        self._extras: dict[str, bytes] = {}
        self._hear = hear
        self._saying: Saying | None = None
        self._usage: Usage | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, piece: Piece) -> None:
        """Raises ``BackendError`` when ids and logprobs don't go together."""
        self._check(piece)
        before = len(self._ids)
        self._ids += piece.token_ids
        self._logprobs += piece.logprobs
        if piece.spans is not None:
            self._spans = join_spans(self._spans or [], piece.spans, before, len(self._ids))
        if piece.prompt_ids is not None:
            self._prompt_ids = piece.prompt_ids
        for name, data in piece.extras.items():
            self._extras[name if name not in self._extras else f"{name}.{before}"] = data
        if piece.said is not None:
            self._saying = self._saying or Saying()
            self._saying.add(piece.said)
        self._usage = piece.usage or self._usage
        self._finish = piece.finish_reason or self._finish

    def hand_over(self, on_tokens: TokenSink, before: int) -> bool:
        """What came after the first ``before`` tokens; whether ``on_tokens`` has enough."""
        fresh = () if self._saying is None else self._saying.fresh()
        if fresh and self._hear is not None:
            self._hear(fresh)
        if len(self._ids) == before and not fresh:
            return False
        return bool(on_tokens(self._ids[before:], self._logprobs[before:]))

    @property
    def finished(self) -> bool:
        """Whether the server has said how it ended."""
        return self._finish is not None

    def finish(self) -> Generation:
        """Raises ``BackendUnavailable`` when the answer ended before the generation did."""
        if self._finish is None:
            raise BackendUnavailable("the answer ended before the generation did", operation=self._operation)
        return self._generation(self._reason(self._finish))

    def aborted(self) -> Generation:
        """What there is of a generation that we stopped ourselves."""
        return self._generation("abort")

    def _generation(self, reason: _Reason) -> Generation:
        return Generation(
            token_ids=self._ids,
            logprobs=self._logprobs,
            finish_reason=reason,
            prompt_ids=self._prompt_ids,
            labels=self._labels(),
            extras=self._extras,
            reply=None if self._saying is None else self._saying.message(),
            usage=self._usage,
        )

    def _labels(self) -> tuple[LabelSpan, ...] | None:
        if self._spans is None or (self._ids and not self._spans):
            return None
        at = 0
        for start, end, _ in self._spans:
            if start != at or end < start:
                raise self._error(f"weight versions leave out or repeat tokens: {self._spans}")
            at = end
        if at != len(self._ids):
            raise self._error(f"weight versions cover {at} of {len(self._ids)} sampled tokens")
        return tuple(LabelSpan(start, end, label) for start, end, label in self._spans)

    def _reason(self, text: str) -> _Reason:
        for reason in _REASONS:
            if reason == text:
                return reason
        raise self._error(f"the generation ended with {text!r}")

    def _check(self, piece: Piece) -> None:
        if len(piece.token_ids) != len(piece.logprobs):
            raise self._error(f"{len(piece.token_ids)} sampled ids came with {len(piece.logprobs)} logprobs")
        if piece.logprobs and min(piece.logprobs) <= NO_EVIDENCE_LOGPROB:
            raise self._error("a sampled token came without its logprob")
        if piece.token_ids and not (min(piece.token_ids) >= 0 and max(piece.token_ids) <= MAX_ID):
            raise self._error("a sampled id can be no token's")
        if self._max_tokens is not None and len(self._ids) + len(piece.token_ids) > self._max_tokens:
            raise self._error(f"more than the {self._max_tokens} tokens that were asked for")

    def _error(self, message: str) -> BackendError:
        return BackendError(message, operation=self._operation)


def join_spans(
    known: list[tuple[int, int, str]], new: list[tuple[int, int, str]], before: int, after: int
) -> list[tuple[int, int, str]]:
    """Add the spans of an event that took the sampled ids from ``before`` to ``after``. Servers count
    from the start of the answer, from the start of the event, or repeat all spans in each event; the
    first and last offset tell which. Neighbours with one label become one span."""
    if new and before and new[0][0] == 0:
        if new[-1][1] == after:
            known = []
        else:
            new = [(start + before, end + before, label) for start, end, label in new]
    joined = list(known)
    for start, end, label in new:
        if joined and joined[-1][2] == label and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end, label)
        elif end > start:
            joined.append((start, end, label))
    return joined


def assembled(pieces: Iterable[Piece], *, operation: str) -> Generation:
    """A whole answer. Raises ``BackendError``."""
    assembly = Assembly(operation)
    for piece in pieces:
        assembly.add(piece)
    return assembly.finish()
