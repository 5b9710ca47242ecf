"""Text of an answer while it is being sampled.

Only what can't change is let out: plain text outside tool calls, whole characters, outer blanks held back,
and what may be the beginning of a text that ends the answer. Thinking is let out as it comes where an open
thought is sure to be read as one, else when it is closed; from the first other control token on, all waits
for the parsed answer. What was let out is therefore always the beginning of the parsed answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rollserve.backend.base import Delta
from rollserve.dialect.base import Piece
from rollserve.gateway.rendering import Rendering
from rollserve.records.call import Message


class _Text:
    """Text as far as it can't change: outer blanks, and what may be the beginning of a stop, are held back.
    ``emit`` gets it. ``stopped_by`` is the one of ``stops`` that the content came to."""

    def __init__(self, stops: Sequence[str], emit: Callable[[Piece], None] | None) -> None:
        self._stops = stops
        self._emit = emit
        self._waiting = ""
        self._begun = False
        self.stopped_by: str | None = None

    def _content(self, text: str) -> None:
        if text and self._stops:
            self._until_stop(text)
        elif text:
            self._grow("content", text)

    def _grow(self, kind: Literal["content", "reasoning"], text: str, hold: int = 0) -> None:
        """Let out all but outer blanks and the last ``hold`` characters."""
        text = self._waiting + text
        if not self._begun:
            text = text.lstrip()
        kept = text[: len(text) - hold].rstrip() if hold else text.rstrip()
        self._waiting = text[len(kept) :]
        if kept:
            self._begun = True
            self._let_out(kind, kept)

    def _until_stop(self, text: str) -> None:
        whole = self._waiting + text
        if not self._begun:
            whole = whole.lstrip()
        found = first_stop(whole, self._stops)
        self._waiting = ""
        if found is None:
            self._grow("content", whole, _may_begin(whole, self._stops))
            return
        at, self.stopped_by = found
        self._grow("content", whole[:at])

    def _let_out(self, kind: Literal["content", "reasoning"], text: str) -> None:
        if text and self._emit is not None:
            self._emit(Piece(kind, text))


class AnswerText(_Text):
    """Follows sampled ids. ``kept`` is the number of ids up to the one that completed a stop; not ``told``:
    the format says what is content only when it is complete."""

    def __init__(
        self,
        rendering: Rendering,
        prompt_tail: list[int],
        offered_tools: bool,
        stops: Sequence[str],
        emit: Callable[[Piece], None] | None,
    ) -> None:
        super().__init__(stops, emit)
        self._tokenizer = rendering.tokenizer
        self._control = rendering.tokenizer.control_ids
        self._open_thoughts = rendering.streams_thinking
        self._decoder = rendering.tokenizer.stream()
        self._think, self._think_end = rendering.think_ids
        self._marks = rendering.mark_ids
        self._state: Literal["start", "text", "thinking", "held"] = rendering.opens_with(
            prompt_tail, offered_tools
        )
        self._thought: list[int] = []
        self.told = self._state != "held"
        self.kept = 0

    def take(self, ids: Sequence[int]) -> bool:
        """Whether the answer is at its end by one of the stops. Tokens that came together are read together,
        unless one of them may be the one that completes a stop."""
        at = 0
        while at < len(ids) and self._state != "held" and self.stopped_by is None:
            end = at + 1 if self._stops else self._end_of_text(ids, at)
            if end == at or ids[at] in self._marks:
                self._mark(ids[at])
                end = at + 1
            elif self._state == "thinking":
                self._grow_thought(ids[at:end])
            else:
                self._content(self._decoder.push(ids[at:end]))
            self.kept += end - at
            at = end
        return self.stopped_by is not None

    def _end_of_text(self, ids: Sequence[int], at: int) -> int:
        """Where the first token that may be more than text stands, from ``at`` on."""
        if self._marks.isdisjoint(ids):
            return len(ids)
        return next((end for end in range(at, len(ids)) if ids[end] in self._marks), len(ids))

    def _mark(self, token_id: int) -> None:
        if self._state == "thinking" and token_id == self._think_end:
            self._close_thought()
        elif self._state == "start" and token_id == self._think:
            self._state = "thinking"
        elif token_id in self._control:
            self._state = "held"
        elif self._state == "thinking":
            self._grow_thought([token_id])
        else:
            self._content(self._decoder.push([token_id]))

    def _close_thought(self) -> None:
        if self._thought:
            self._let_out("reasoning", self._tokenizer.decode(self._thought).strip())
        self._state, self._begun, self._waiting = "text", False, ""
        self._decoder = self._tokenizer.stream()

    def _grow_thought(self, ids: Sequence[int]) -> None:
        if self._open_thoughts:
            self._grow("reasoning", self._decoder.push(ids))
        else:
            self._thought += ids

    def _content(self, text: str) -> None:
        super()._content(text)
        if self._begun:
            self._state = "text"


class SaidText(_Text):
    """Follows text that an engine has read itself; reasoning comes before content."""

    def __init__(self, stops: Sequence[str], emit: Callable[[Piece], None] | None) -> None:
        super().__init__(stops, emit)
        self._kind: Literal["content", "reasoning"] = "reasoning"

    def hear(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if self.stopped_by is not None:
                return
            if delta.kind != self._kind:
                self._kind, self._begun, self._waiting = delta.kind, False, ""
            if delta.kind == "content":
                self._content(delta.text)
            else:
                self._grow("reasoning", delta.text)


class LetOut:
    """What has been let out of one answer, and so what is missing."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {"reasoning": [], "content": []}

    def add(self, piece: Piece) -> None:
        self._parts[piece.kind].append(piece.text)

    def rest(self, message: Message) -> list[Piece]:
        """What is missing of the parsed answer, in order."""
        pieces = [
            Piece("reasoning", _after("".join(self._parts["reasoning"]), message.reasoning or "")),
            Piece("content", _after("".join(self._parts["content"]), message.content)),
        ]
        return [piece for piece in pieces if piece.text]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the stops begins, and which it is; the longest of those that begin there."""
    found = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    at, _, stop = min(found)
    return at, stop


def _may_begin(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that one of the stops begins with."""
    longest = max(map(len, stops))
    for length in range(min(len(text), longest - 1), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0


def _after(sent: str, whole: str) -> str:
    return whole[len(sent) :] if whole.startswith(sent) else ""
