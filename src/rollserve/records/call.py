"""A model call, token for token. Hot: msgspec structs, arrays packed as little-endian bytes.

The tree of an attempt's calls is its *trajectory*: a call names its parent, and holds only the tokens
it added. ``prompt_ids`` of a call are what the context gained since the parent's last sampled token
(for a root: the whole prompt); ``sampled_ids`` what the model then said, its stop token included. The
context of a call is therefore the concatenation root → call.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``arguments`` is the JSON text the model wrote. ``error`` says why it could not be parsed or
    does not fit; such a call goes back to the agent as something it can act on."""

    id: str
    name: str
    arguments: str
    error: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message, in the form all dialects are translated to and from."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came, in our words. ``tools`` are OpenAI tool objects. ``asked`` are sampling
    parameters the harness asked for (recorded; the run's settings win; ``max_tokens`` and ``stop``
    can only tighten)."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    asked: dict[str, Any] = {}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The effective parameters of one call; what was sent to the backend."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 4096
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``[start, end)`` of the sampled ids came from ``version``. ``inferred``: the backend
    reported none; ``[version, version_high]`` is the interval it lies in."""

    start: int
    end: int
    version: int
    version_high: int
    inferred: bool = False


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """The context could not be extended exactly: a new root was rendered. ``cause`` is a stable word
    (``template``, ``history_edited``, ``tools_changed``, ``thinking_stripped``, ``backend_ids``);
    ``at_message`` the first message that differs; ``from_call`` what it would have extended."""

    cause: str
    at_message: int
    from_call: str | None = None
    detail: str = ""


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``messages`` are those the context gained since the parent (the model's own turns left out);
    ``tools`` is set where it differs from the parent's. ``*_ids`` are packed int32, ``logprobs``
    packed float32, one per sampled id. ``extras`` are the backend's opaque per-token arrays
    (routed experts, sampling masks) by name. Times are wall-clock seconds since the epoch."""

    id: str
    parent: str | None
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_ids: bytes
    sampled_ids: bytes
    logprobs: bytes
    versions: tuple[VersionSpan, ...]
    reply: Message
    finish_reason: Literal["stop", "length", "abort", "tool_calls"]
    sampling: SamplingParams
    asked: dict[str, Any] = {}
    backend: str = ""
    logprobs_mode: str = "unknown"
    constrained: bool = False
    broke: Break | None = None
    inexact: str | None = None
    extras: dict[str, bytes] = {}
    started_at: float = 0.0
    first_token_at: float | None = None
    finished_at: float = 0.0


def pack_ids(ids: list[int] | Int32) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Int32:
    return np.frombuffer(data, dtype="<i4")


def pack_floats(values: list[float] | Float32) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> Float32:
    return np.frombuffer(data, dtype="<f4")
