"""The contract of an inference backend: token ids in, token ids and logprobs out.

Implementations: ``vllm`` (also speaks to ``rollserve.localserver``), ``openai``, ``sglang`` (later),
and ``rollserve.testing.scripted``. Each passes ``rollserve.testing.backend_conformance``. Backends do
not retry and do not balance: the pool does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import msgspec

from rollserve.records.call import SamplingParams
from rollserve.records.policy import BackendInfo


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``cache_salt`` separates prefix caches: it changes with the policy version."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""


class LabelSpan(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens ``[start, end)`` came from weights the backend calls ``label``."""

    start: int
    end: int
    label: str


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """``token_ids`` include the stop token; ``logprobs`` has one entry a token. ``prompt_ids`` is what
    the backend says it consumed, None when it doesn't. ``labels`` is None when it reports no
    versions. ``extras`` are opaque per-token arrays by name."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    prompt_ids: list[int] | None = None
    labels: tuple[LabelSpan, ...] | None = None
    extras: dict[str, bytes] = {}


TokenSink = Callable[[list[int], list[float]], None]
"""Called with newly sampled ids and their logprobs, in order, as they arrive."""


class BackendHealth(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    detail: str = ""
    running: int | None = None
    waiting: int | None = None


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

    async def health(self) -> BackendHealth: ...

    async def close(self) -> None: ...


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """A generation and the backend that made it."""

    generation: Generation
    backend_id: str
    info: BackendInfo


class Pool(Protocol):
    """The backends of one policy, as one. Chooses by least in-flight, keeps a session on its backend
    (prefix cache), moves it when that one drains, fails or is removed, and tries another only while no
    token has been handed over."""

    async def generate(
        self,
        session_id: str,
        request: GenerateRequest,
        on_tokens: TokenSink | None = None,
        *,
        pause: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Routed:
        """Time spent waiting for a backend, or before another try, is inside ``pause()``. Raises
        ``BackendUnavailable`` when every backend was tried or none is active within the pool's bounded
        wait; ``ContextTooLong``; ``BackendError``."""

    def release(self, session_id: str) -> None:
        """The session has ended: forget where it was."""
