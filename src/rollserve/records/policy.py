"""Policies and the backends that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from rollserve.records.base import JsonObject, Name, Record
from rollserve.records.update import Canary, WeightUpdate

MAX_VERSION = 2**31 - 1
"""Versions stand beside tokens as int32."""


class RendererSpec(Record):
    """How messages become token ids. ``name`` is one of the ``renderers`` package's (``qwen3``,
    ``glm-5``, ``gpt-oss``, …) or ``default`` for the tokenizer's own chat template; ``options`` are
    that renderer's settings (``{"enable_thinking": false}``)."""

    name: str = "qwen3"
    options: JsonObject = {}


Interface = Literal["tokens", "chat", "text"]


class PolicySpec(Record):
    """``model`` is the name its backends serve it under. ``tokenizer`` is ``tiny`` (shipped, for demo
    and tests), a directory or ``tokenizer.json`` readable by the workers, or a hub name; None only where
    there are no tokens to read. ``interface`` is how its backends are spoken to, all of them alike:
    ``tokens`` (ids in, ids out; messages are rendered here), ``chat`` (messages in; the engine renders, and
    says which ids it consumed and sampled) or ``text`` (messages in, text out: nothing can be trained)."""

    name: Name
    model: Annotated[str, Field(min_length=1, max_length=1024)]
    tokenizer: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    interface: Interface = "tokens"
    renderer: RendererSpec = RendererSpec()
    context_tokens: Annotated[int | None, Field(ge=16, le=100_000_000)] = None


class TemplateReport(Record):
    """What probing a chat template found under one setting of thinking. ``exact``: what a conversation
    gains is what the template would make of the whole of it, in every case tried. ``exceptions`` are
    stable words ``case:how``, where *how* is ``break`` (it can't be extended: a new root is rendered),
    ``differ`` (extended otherwise than the template renders the whole), ``refused`` (the template does
    not take such a conversation) or ``misread`` (the reply does not come back as it was said).
    ``inexact``: nothing can be extended, or text can become control tokens. ``unknown``: it could not
    be probed. ``detail`` says why, for the last two."""

    verdict: Literal["exact", "exceptions", "inexact", "unknown"]
    exceptions: list[str] = []
    detail: str = ""


class TemplateFinding(Record):
    """By what a run says of earlier thinking."""

    keep: TemplateReport
    strip: TemplateReport


class Policy(Record):
    """``labels`` maps what backends call their weights to our integer version. ``template`` is None until
    it has been probed. ``weights`` counts every change of the weights, a rewind's among them: it separates
    prefix caches, where versions come again. ``update`` and ``canary`` are the last ones."""

    spec: PolicySpec
    version: int = 0
    paused: bool = False
    labels: dict[str, int] = {}
    template: TemplateFinding | None = None
    weights: int = 0
    update: WeightUpdate | None = None
    canary: Canary | None = None

    @property
    def cache_salt(self) -> str:
        """Of prefix caches filled under the weights of now."""
        return f"{self.spec.name}:{self.version}.{self.weights}"


class BackendKind(StrEnum):
    VLLM = "vllm"
    LOCAL = "local"
    SGLANG = "sglang"
    OPENAI = "openai"
    CHAT = "chat"
    TEXT = "text"
    SCRIPTED = "scripted"

    @property
    def interface(self) -> Interface:
        """How a server of this kind is spoken to."""
        if self is BackendKind.CHAT:
            return "chat"
        return "text" if self is BackendKind.TEXT else "tokens"


Modality = Literal["text", "image"]


class BackendSpec(Record):
    """One inference server. ``url`` is its root, without ``/v1``. ``options`` belong to the kind. It gets
    calls in proportion to its ``weight``. ``accepts`` says what its model takes in messages; ``image`` is for
    kinds that are sent messages, and is tried when it registers."""

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    kind: BackendKind = BackendKind.VLLM
    api_key: SecretStr | None = None
    options: JsonObject = {}
    weight: Annotated[float, Field(ge=0.01, le=1000)] = 1.0
    accepts: Annotated[list[Modality], Field(min_length=1, max_length=2)] = ["text"]


class BackendState(StrEnum):
    """``fenced``: it does not serve the weights it claims; not used until a later check finds that it does,
    or it is registered again."""

    ACTIVE = "active"
    DRAINING = "draining"
    FAILED = "failed"
    FENCED = "fenced"


class BackendInfo(Record):
    """What probing a backend found. ``logprobs_mode`` is ``processed`` (of the sampled distribution),
    ``temperature`` (after temperature, before top_p and top_k), ``raw`` (before all three) or
    ``unknown``. ``structured``: it can be held to a JSON schema. ``image_token``: the id whose run stands for
    an image among the ids it consumed, None where there is no such one. ``adapter_of``: the model is an
    adapter (LoRA) of this one."""

    engine: str
    models: list[str]
    context_tokens: int | None = None
    logprobs_mode: str = "unknown"
    reports_versions: bool = False
    structured: bool = False
    image_token: int | None = None
    adapter_of: str | None = None
    warnings: list[str] = []


class Backend(Record):
    id: str
    policy: str
    spec: BackendSpec
    info: BackendInfo
    state: BackendState = BackendState.ACTIVE
    error: str | None = None


def takes_images(policy: PolicySpec, backends: Sequence[Backend]) -> bool:
    """Whether messages to it may hold images: all its backends must take them, since a session may move from
    one to another."""
    return policy.interface != "tokens" and all("image" in each.spec.accepts for each in backends)
