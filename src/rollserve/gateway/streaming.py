"""Text of an answer while it is being sampled.

Only what can't change is let out: plain text outside thinking and tool calls, whole characters, outer
blanks held back. Thinking is let out when it is closed; from the first other control token on, all
waits for the parsed answer. What was let out is therefore always the beginning of the parsed answer;
``rest`` is what is missing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from rollserve.gateway.rendering import Rendering
from rollserve.records.call import Message


class Piece(NamedTuple):
    kind: Literal["content", "reasoning"]
    text: str


class AnswerStream:
    """``gateway.forward.Listener`` that hands on text pieces."""

    def __init__(self, emit: Callable[[Piece], None]) -> None:
        self._emit = emit
        self._state: Literal["start", "text", "thinking", "held"] = "held"
        self._thought: list[int] = []
        self._blanks = ""
        self.content = ""
        self.reasoning = ""

    def begin(self, rendering: Rendering, prompt_tail: list[int], offered_tools: bool) -> None:
        self._tokenizer = rendering.tokenizer
        self._decoder = rendering.tokenizer.stream()
        self._control = rendering.tokenizer.control_ids
        self._think, self._think_end = rendering.think_ids
        if rendering.streams_text(prompt_tail, offered_tools):
            self._state = "start"

    def sampled(self, ids: list[int]) -> None:
        for token_id in ids:
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        if self._state == "held":
            return
        if self._state == "thinking":
            if token_id == self._think_end:
                self._let_out("reasoning", self._tokenizer.decode(self._thought).strip())
                self._state = "text"
            elif token_id in self._control:
                self._state = "held"
            else:
                self._thought.append(token_id)
        elif self._state == "start" and token_id == self._think:
            self._state = "thinking"
        elif token_id in self._control:
            self._state = "held"
        else:
            self._text(self._decoder.push(token_id))

    def _text(self, text: str) -> None:
        """Blanks are let out with the text that follows them."""
        text = self._blanks + text
        if not self.content:
            text = text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            self._state = "text"
            self._let_out("content", kept)

    def _let_out(self, kind: Literal["content", "reasoning"], text: str) -> None:
        if not text:
            return
        if kind == "content":
            self.content += text
        else:
            self.reasoning += text
        self._emit(Piece(kind, text))

    def rest(self, message: Message) -> list[Piece]:
        """What is missing of the parsed answer, in order."""
        pieces = [
            Piece("reasoning", _after(self.reasoning, message.reasoning or "")),
            Piece("content", _after(self.content, message.content)),
        ]
        return [piece for piece in pieces if piece.text]


def _after(sent: str, whole: str) -> str:
    return whole[len(sent) :] if whole.startswith(sent) else ""
