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

from rollserve.records.image import Image, Picture, PlacedImage

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Label = Literal["continuation", "fork", "compaction", "subagent", "retry", "side"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``arguments`` is the JSON text the model wrote. ``error`` says why it could not be parsed or
    does not fit; such a call goes back to the agent as something it can act on."""

    id: str
    name: str
    arguments: str
    error: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message, in the form all dialects are translated to and from. ``call_id`` of a model turn is
    the call that made it, where the client sent back a signature or id of ours that says so. ``images`` (of a
    user's message, or of a tool's result) stand in ``content``, in their order."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    call_id: str | None = None
    images: tuple[Image, ...] = ()


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came, in our words. ``tools`` are OpenAI tool objects. ``asked`` are sampling
    parameters the harness asked for (recorded; the run's settings win; ``max_tokens`` can only tighten).
    ``stop`` are texts that end the answer. ``schema`` is the JSON schema the answer must have (``{}``:
    any object), None when it is free. ``hints`` are what the client says of itself: ``subagent`` (who,
    empty for the main line), ``session``, ``purpose`` (``compaction``, ``title``), ``retry``. ``pictures``
    are the messages' images by their ``key``, as far as the request brought them. ``route`` is which of the
    run's routes is asked; its own policy where that is empty."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    asked: dict[str, Any] = {}
    stop: tuple[str, ...] = ()
    schema: dict[str, Any] | None = None
    hints: dict[str, str] = {}
    pictures: dict[str, Picture] = {}
    route: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The effective parameters of one call; what was sent to the backend. ``json_schema`` is what the answer
    was held to (``{}``: any object)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 4096
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    json_schema: dict[str, Any] | None = None


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``[start, end)`` of the sampled ids came from ``version``. ``inferred``: the backend
    reported none; ``[version, version_high]`` is the interval it lies in. ``mixed``: the weights changed
    while the generation stood still in its engine, so these tokens were sampled on what older weights had
    made of the context."""

    start: int
    end: int
    version: int
    version_high: int
    inferred: bool = False
    mixed: bool = False


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """The context could not be extended exactly: a new root was rendered. ``cause`` is a stable word
    (``template``, ``history_edited``, ``system_changed``, ``tools_changed``, ``thinking_stripped``, or what
    was rewritten where the run's rule is ``faithful``);
    ``at_message`` the first message that differs; ``from_call`` what it would have extended."""

    cause: str
    at_message: int
    from_call: str | None = None
    detail: str = ""


class Drift(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A place where what was sent, rendered or consumed is not what the tree holds. ``cause`` is a stable
    word (see ``docs/concepts.md``). ``absorbed``: the meaning is the same, and the sampled ids stand.
    ``at_message`` is an index into the request's messages, ``at_token`` into the context of ``from_call``,
    its sampled ids included. ``expected`` are ids that context holds from there on, ``found`` those that
    stand there instead (a few of each), with their text. ``untrainable`` sampled tokens of this call can't
    be trained on because of it."""

    cause: str
    absorbed: bool = False
    at_message: int | None = None
    at_token: int | None = None
    from_call: str | None = None
    expected: tuple[int, ...] = ()
    found: tuple[int, ...] = ()
    expected_text: str = ""
    found_text: str = ""
    untrainable: int = 0


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``messages`` are those the context gained since the parent (the model's own turns left out);
    ``tools`` is set where it differs from the parent's. ``*_ids`` are packed int32, ``logprobs``
    packed float32, one per sampled id. ``extras`` are the backend's opaque per-token arrays
    (routed experts, sampling masks) by name. Times are wall-clock seconds since the epoch. ``label`` is
    what the call was taken for when it came (``gateway.lineage`` has the rules, and ``settled`` what is
    known in the end), ``origin`` the call it stems from where that is not its parent. ``policy`` is set
    where another policy than the run's answered, ``route`` where it was asked by a route of the run's.
    ``images`` are those of ``messages``, placed in
    ``prompt_ids``; none where there are no ids."""

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
    label: Label = "continuation"
    origin: str | None = None
    drift: tuple[Drift, ...] = ()
    policy: str = ""
    route: str = ""
    extras: dict[str, bytes] = {}
    images: tuple[PlacedImage, ...] = ()
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
