"""Where an answer ends by a text that the request named: honoured here, so that it is the same at every
engine.

The text is looked for in the content, as the agent will read it, and never in thinking or tool calls. Tokens
are kept up to the one that completes it; the content ends before it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from rollserve.backend.base import Delta, LabelSpan, Routed
from rollserve.dialect.base import Piece
from rollserve.gateway.parsing import Parsed
from rollserve.gateway.rendering import Rendering
from rollserve.gateway.streaming import AnswerText, SaidText, first_stop
from rollserve.records.call import ChatRequest
from rollserve.records.ids import Ids


class Listener(Protocol):
    """Follows a generation: ``admitted`` when a backend has taken it (not every kind says so), then text of
    the answer that can't change any more."""

    def admitted(self) -> None: ...

    def let_out(self, piece: Piece) -> None: ...


class Following:
    """The ``TokenSink`` of a call."""

    def __init__(self, text: AnswerText, listener: Listener | None) -> None:
        self.text = text
        self.first_token_at: float | None = None
        self._listener = listener

    def __call__(self, ids: list[int], logprobs: list[float]) -> bool:
        if not ids:
            if self._listener is not None:
                self._listener.admitted()
            return False
        if self.first_token_at is None:
            self.first_token_at = time.time()
        return self.text.take(ids)


class Hearing:
    """The ``TokenSink`` of a call whose engine reads the answer itself, and its ``TextSink``."""

    def __init__(self, text: SaidText, listener: Listener | None) -> None:
        self.text = text
        self.first_token_at: float | None = None
        self._listener = listener

    def hear(self, deltas: Sequence[Delta]) -> None:
        self._started()
        self.text.hear(deltas)

    def __call__(self, ids: list[int], logprobs: list[float]) -> bool:
        if ids:
            self._started()
        elif self._listener is not None:
            self._listener.admitted()
        return self.text.stopped_by is not None

    def _started(self) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.time()


@dataclass(frozen=True, slots=True)
class Ended:
    """A generation, and the request's text that ended it."""

    routed: Routed
    stopped_by: str | None = None

    def text(self, parsed: Parsed) -> Parsed:
        """The answer without the text that ended it, and what came after."""
        if self.stopped_by is None:
            return parsed
        content = parsed.message.content.partition(self.stopped_by)[0].rstrip()
        return Parsed(replace(parsed.message, content=content), parsed.finish)


def follow(
    rendering: Rendering | None, request: ChatRequest, prompt: Ids, listener: Listener | None
) -> Following | Hearing | None:
    """None where nobody wants to hear of the tokens: then the answer comes whole, which costs less. Without a
    ``rendering`` the engine reads the answer itself."""
    if listener is None and not request.stop:
        return None
    emit = None if listener is None else listener.let_out
    if rendering is None:
        return Hearing(SaidText(request.stop, emit), listener)
    return Following(AnswerText(rendering, prompt.list, bool(request.tools), request.stop, emit), listener)


def ended(
    rendering: Rendering | None,
    request: ChatRequest,
    prompt: Ids,
    routed: Routed,
    following: Following | Hearing | None,
) -> Ended:
    """Where the engine reads the answer itself all tokens that came are kept: which of them completed the
    text is the engine's to know."""
    if following is None or not request.stop:
        return Ended(routed)
    if following.text.stopped_by is not None:
        tokens = len(routed.generation.token_ids)
        kept = following.text.kept if isinstance(following, Following) else tokens
        return Ended(_begun(routed, kept), following.text.stopped_by)
    if rendering is None or isinstance(following, Hearing) or following.text.told:
        return Ended(routed)
    return _late(rendering, request, prompt, routed)


def _late(rendering: Rendering, request: ChatRequest, prompt: Ids, routed: Routed) -> Ended:
    """For formats whose text can be told only from the complete answer."""
    ids = routed.generation.token_ids
    said = rendering.parse(ids, request.tools, prompt.list, cut=True).message
    found = None if said.tool_calls else first_stop(said.content, request.stop)
    if found is None:
        return Ended(routed)
    at, stop = found

    def holds(count: int) -> bool:
        part = rendering.parse(ids[:count], request.tools, prompt.list, cut=True).message
        return part.content.find(stop) == at

    return Ended(_begun(routed, bisect_left(range(1, len(ids)), True, key=holds) + 1), stop)


def _begun(routed: Routed, tokens: int) -> Routed:
    """The first tokens of a generation. Opaque arrays that were longer can't be cut, and are left out."""
    generation = routed.generation
    whole = len(generation.token_ids) <= tokens
    labels = None if generation.labels is None else _labels(generation.labels, tokens)
    begun = replace(
        generation,
        token_ids=generation.token_ids[:tokens],
        logprobs=generation.logprobs[:tokens],
        finish_reason="stop",
        labels=labels,
        extras=generation.extras if whole else {},
    )
    return replace(routed, generation=begun)


def _labels(labels: tuple[LabelSpan, ...], tokens: int) -> tuple[LabelSpan, ...]:
    return tuple(
        LabelSpan(span.start, min(span.end, tokens), span.label) for span in labels if span.start < tokens
    )
