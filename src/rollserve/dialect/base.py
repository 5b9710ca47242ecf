"""The contract of a dialect: one provider's wire format, to and from our records. Pure.

Implementations: ``chat``, ``responses``, ``messages``, ``generate_content``. A dialect never decides:
what may be asked, what is sampled and what becomes of a call is the gateway's business. It says what
a request means in our words, and puts answers, streams and errors into the form that the provider's
own clients read. Nothing is lost on the way and nothing invented; what can't be honoured is refused
with ``InvalidInput`` that names the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from rollserve.errors import RollserveError
from rollserve.records.call import ChatRequest, Message

Operation = Literal["generate", "count", "models"]

POSITION = "#"
"""Begins the ``tool_call_id`` of a result whose client drops the ids of calls: ``#1`` answers the second
call of the model turn before it, whose ``ToolCall.id`` is then empty."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a path asks for. ``model`` and ``stream`` are set where the path says them (Google's does)."""

    operation: Operation
    model: str = ""
    stream: bool | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request, and how its answer is wanted. ``n`` answers are wanted of one prompt. ``form`` is the
    dialect's own: what its writers must know of the request; ``logprobs`` asks for those of the sampled
    tokens. ``continues`` names an earlier answer (``previous_response_id``) whose conversation comes
    before ``request.messages``; ``continuable``: this one's may be gone on from so, and what it needs for
    that is to be kept."""

    request: ChatRequest
    model: str = ""
    stream: bool = False
    n: int = 1
    logprobs: bool = False
    continues: str | None = None
    continuable: bool = False
    form: Any = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """One sampled token of an answer: its text and logprob."""

    token: str
    logprob: float


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. ``call_id`` is unique: dialects mint the ids and signatures that round-trip from it.
    ``finish_reason`` is ``stop``, ``tool_calls``, ``length`` or ``abort``; ``stopped_by`` is the stop
    string that ended it. Token counts are of real ids; ``cached_tokens`` of the prompt were known before.
    ``tokens`` are set when logprobs were asked for."""

    call_id: str
    message: Message
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int = 0
    stopped_by: str | None = None
    tokens: Sequence[TokenLogprob] | None = None


class Piece(NamedTuple):
    """Text of an answer that is being sampled; what was let out never changes."""

    kind: Literal["content", "reasoning"]
    text: str


class StreamWriter(Protocol):
    """The bytes of one streamed answer, in order: ``opening``, then pieces and keep-alives, then
    ``closing`` or ``failure``. Stateful; every method returns whole events, perhaps none (``b""``)."""

    def opening(self) -> bytes:
        """May be sent long before the first token."""

    def piece(self, piece: Piece, *, choice: int = 0) -> bytes: ...

    def keep_alive(self) -> bytes:
        """Events that reset every client's timer and change nothing."""

    def closing(self, answers: Sequence[Answered], rest: Sequence[Sequence[Piece]]) -> bytes:
        """What is missing of each choice's text (``rest``), its tool calls, the terminal events."""

    def failure(self, error: RollserveError, status: int) -> bytes:
        """The call failed after the stream had begun."""


class Dialect(Protocol):
    """``error_type`` of bodies and streams are the dialect's own."""

    name: str

    def target(self, method: str, path: str) -> Target | None:
        """What a path (without a session's prefix and without a query) asks for; None when it is none of
        this dialect's. Raises ``MethodNotAllowed`` for a known path and another method."""

    def parse(
        self, target: Target, body: bytes, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> Asked:
        """A ``generate`` or ``count`` request. ``headers`` have lower-case names. Raises ``InvalidInput``
        that names the parameter at fault."""

    def whole(self, asked: Asked, answers: Sequence[Answered], *, created_s: int) -> bytes:
        """The answer to a request without streaming; as many answers as choices were asked for."""

    def writer(self, asked: Asked, *, stream_id: str, created_s: int) -> StreamWriter:
        """``stream_id`` is what will be the first answer's ``call_id``."""

    def counted(self, asked: Asked, prompt_tokens: int) -> bytes:
        """The answer to a ``count`` request."""

    def models(self, names: Sequence[str], *, created_s: int) -> bytes: ...

    def model(self, name: str, *, created_s: int) -> bytes:
        """One model, where the path named it (``Target.model``)."""

    def error(self, error: RollserveError, status: int) -> bytes:
        """An error's body in the provider's form."""
