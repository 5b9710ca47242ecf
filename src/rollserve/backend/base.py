"""The contract of an inference backend: token ids in, token ids and logprobs out.

Implementations: ``vllm`` (also speaks to ``rollserve.localserver``), ``sglang``, ``openai``, and
``rollserve.testing.scripted``; and ``chat``, where messages go in and the engine renders. Each passes
``rollserve.testing.backend_conformance``. Backends do not retry and do not balance: the pool does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from rollserve.errors import BackendUnavailable
from rollserve.records.call import Message, SamplingParams
from rollserve.records.policy import BackendInfo


class Delta(NamedTuple):
    """Text of an answer that an engine has read; it may lag behind the ids, or come without any."""

    kind: Literal["content", "reasoning"]
    text: str


TextSink = Callable[[Sequence[Delta]], None]


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """What to answer where the engine renders: messages (with ids of tool calls as the model wrote them) and
    OpenAI tool objects. ``pictures`` are the bytes of the messages' images by digest, addresses left out.
    ``hear`` gets text as it comes, each before the ``TokenSink`` is called for it."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    pictures: Mapping[str, bytes] = {}
    hear: TextSink | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``cache_salt`` separates prefix caches: it changes with the policy version. ``session_id`` lets
    an engine of several replicas keep a session's calls on one. With ``chat`` the engine renders, and
    ``token_ids`` are empty."""

    request_id: str
    model: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    cache_salt: str = ""
    session_id: str = ""
    chat: Chat | None = None


class LabelSpan(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens ``[start, end)`` came from weights the backend calls ``label``."""

    start: int
    end: int
    label: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, as a server that gives no ids counts them."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """``token_ids`` include the stop token; ``logprobs`` has one entry a token. ``prompt_ids`` is what
    the backend says it consumed, None when it doesn't. ``labels`` is None when it reports no
    versions. ``extras`` are opaque per-token arrays by name. ``reply`` is what was said, as an engine that
    renders has read it, with its own ids of tool calls; where there are no ids at all it is all there is,
    and ``usage`` what the server counted."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    prompt_ids: list[int] | None = None
    labels: tuple[LabelSpan, ...] | None = None
    extras: dict[str, bytes] = {}
    reply: Message | None = None
    usage: Usage | None = None


TokenSink = Callable[[list[int], list[float]], bool | None]
"""Called with newly sampled ids and their logprobs, in order, as they arrive; first with none once the
server has taken the request, where that can be told, and with none again where text comes without ids
(``Chat.hear``). True says that it is enough: the generation is stopped at the server, and ends as an
``abort`` with what it had."""


class BackendHealth(msgspec.Struct, frozen=True, kw_only=True):
    """``generated_tokens`` is the engine's own counter since its start, over all who use it: two
    readings tell whether it is at work. ``tokens_per_s`` is for engines that tell their rate and no count.
    ``kv_use`` is how full its key-value cache is, from 0 to 1, ``preemptions`` how often it has thrown away
    what it had computed, since its start. None where the server does not say."""

    ok: bool
    detail: str = ""
    running: int | None = None
    waiting: int | None = None
    generated_tokens: int | None = None
    tokens_per_s: float | None = None
    kv_use: float | None = None
    preemptions: int | None = None


class Backend(Protocol):
    """One inference server. All methods may raise ``BackendError``; ``BackendUnavailable`` when the
    server did not answer (another may), ``ContextTooLong`` when the prompt does not fit."""

    async def probe(self) -> BackendInfo:
        """Look at the server and say what it is. Raises ``InvalidInput`` (field ``url``) when what
        answers there is no such backend, and says what was found instead."""

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        """Sample one completion. With ``on_tokens`` tokens are handed over as they come. Cancelling
        the await aborts the generation at the server before the cancellation is passed on."""

    async def abort(self, request_ids: list[str]) -> None:
        """Stop generations; each ends with ``finish_reason="abort"`` and what it had."""

    async def score(self, token_ids: list[int], *, model: str) -> list[float]:
        """The logprob of each token but the first, given those before it, in the model's own
        distribution (temperature 1, nothing cut off), under the weights served now. Raises
        ``CannotScore`` where the server does not offer it. Bounded; a cancel closes the connection."""

    async def health(self) -> BackendHealth: ...

    async def look(self) -> BackendHealth:
        """Its health, and not well where what answers is no model server any more, or does not list the
        model: another one may stand at the address. Samples nothing."""

    async def close(self) -> None: ...


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """A generation and the backend that made it."""

    generation: Generation
    backend_id: str
    info: BackendInfo


def unrefunded() -> Callable[[], None]:
    """For callers whose time is nobody's budget."""
    return lambda: None


class Pool(Protocol):
    """The backends of one policy, as one. Chooses by least in-flight, keeps a session on its backend
    (prefix cache), moves it when that one drains, fails, is removed, or is full for longer than the prefix
    is worth, and tries another only while no token has been handed over."""

    async def generate(
        self,
        session_id: str,
        request: GenerateRequest,
        on_tokens: TokenSink | None = None,
        *,
        pause: Callable[[], AbstractContextManager[None]] = nullcontext,
        refundable: Callable[[], Callable[[], None]] = unrefunded,
    ) -> Routed:
        """Time spent waiting for a backend, or before another try, is inside ``pause()``. ``refundable``
        is called as a try begins, and what it returned when the try was lost through the backend's fault
        or the pool's. Raises ``BackendUnavailable`` when every backend was tried, none is active within
        the pool's bounded wait, or one fell silent and no other can be tried; ``ContextTooLong``;
        ``BackendError``."""

    async def stalled(self, session_id: str, run_s: float) -> BackendUnavailable | None:
        """Whether a call of the session that is out now waits on a backend that is not well or does
        nothing; the error names it, and how long it was silent. ``run_s`` is what the session's agent
        was given. None when it is at work, or nothing is out. Within about 9 s; ends no call."""

    def release(self, session_id: str) -> None:
        """The session has ended: forget where it was."""
