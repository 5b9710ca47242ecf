"""A provider's client, as ``dialect_conformance`` needs it, and what it sends and hears."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollserve.dialect.base import Answered, Asked, Dialect, TokenLogprob
from rollserve.records.call import ChatRequest, Message
from rollserve.testing.dialect_cases import pieces_of

CREATED_S = 1_700_000_000


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A request as the provider's client sends it. ``headers`` have lower-case names."""

    path: str
    body: bytes
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Heard:
    """One answer as the provider's client reads it, in our words. Token counts are None where the client
    is told none. ``tokens`` are the logprobs it reads, None where it reads none."""

    message: Message
    finish_reason: str
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: tuple[TokenLogprob, ...] | None = None


class DialectSubject(ABC):
    """A provider's client. ``choices`` is how many answers one request can ask for at most, ``logprobs``
    whether it can ask for those of the sampled tokens, ``marks`` whether a turn that comes back from this
    client names its call."""

    dialect: Dialect
    choices: int = 1
    logprobs: bool = False
    marks: bool = True
    known_path: str = ""
    """A path of this dialect, with a method other than ``wrong_method``."""
    wrong_method: str = "DELETE"

    @abstractmethod
    def send(
        self, request: ChatRequest, *, stream: bool = False, n: int = 1, logprobs: bool = False
    ) -> Sent: ...

    @abstractmethod
    def send_after(self, request: ChatRequest, answer: bytes, then: Sequence[Message]) -> Sent:
        """The next request of a client that was given ``answer`` (a whole one): its conversation is the
        request's, the answer as the client keeps it, and ``then``."""

    @abstractmethod
    def read(self, answer: bytes) -> list[Heard]:
        """A whole answer; an answer each choice."""

    @abstractmethod
    def read_stream(self, stream: bytes) -> list[Heard]:
        """A streamed answer, put together from its events as the client does."""

    @abstractmethod
    def read_error(self, body: bytes) -> str:
        """The message of an error's body."""

    @abstractmethod
    def read_failure(self, stream: bytes) -> str:
        """The message of the error that ended a stream."""

    @abstractmethod
    def read_models(self, body: bytes) -> list[str]: ...

    def normal(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """What is left of a conversation in the provider's words (where they say less than ours)."""
        return tuple(messages)

    def finish(self, reason: str) -> str:
        """What is left of a finish reason in the provider's words."""
        return "length" if reason == "abort" else reason

    def parse(self, sent: Sent) -> Asked:
        target = self.dialect.target(sent.method, sent.path)
        assert target is not None
        return self.dialect.parse(target, sent.body, sent.headers, sent.query)

    def stream(self, asked: Asked, given: Sequence[Answered], cuts: Sequence[int], told: int) -> bytes:
        """The whole stream of an answer whose texts come in pieces: the first ``told`` of them while it is
        sampled, the others at its end, with keep-alives in between."""
        writer = self.dialect.writer(asked, stream_id=given[0].call_id, created_s=CREATED_S)
        pieces = [pieces_of(answer.message, cuts) for answer in given]
        parts = [writer.opening(), writer.keep_alive()]
        for choice, of_choice in enumerate(pieces):
            for piece in of_choice[:told]:
                parts += [writer.piece(piece, choice=choice), writer.keep_alive()]
        parts.append(writer.closing(given, [of_choice[told:] for of_choice in pieces]))
        return b"".join(parts)


def meaning(messages: Sequence[Message]) -> list[Any]:
    """For comparing: arguments as JSON where they are JSON; no difference between no reasoning and an
    empty one; not whose call it was."""
    return [_meaning(message) for message in messages]


def _meaning(message: Message) -> Any:
    calls = [(call.id, call.name, _json(call.arguments)) for call in message.tool_calls]
    return (
        message.role,
        message.content,
        message.reasoning or None,
        calls,
        message.tool_call_id,
        message.name,
        message.images,
    )


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
