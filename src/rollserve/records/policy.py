"""Policies and the backends that serve them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, SecretStr

from rollserve.records.base import JsonObject, Name, Record

MAX_VERSION = 2**31 - 1
"""Versions stand beside tokens as int32."""


class RendererSpec(Record):
    """How messages become token ids. ``name`` is one of the ``renderers`` package's (``qwen3``,
    ``glm-5``, ``gpt-oss``, …) or ``default`` for the tokenizer's own chat template; ``options`` are
    that renderer's settings (``{"enable_thinking": false}``)."""

    name: str = "qwen3"
    options: JsonObject = {}


class PolicySpec(Record):
    """``model`` is the name its backends serve it under. ``tokenizer`` is ``tiny`` (shipped, for demo
    and tests), a directory or ``tokenizer.json`` readable by the workers, or a hub name."""

    name: Name
    model: Annotated[str, Field(min_length=1, max_length=1024)]
    tokenizer: Annotated[str, Field(min_length=1, max_length=4096)]
    renderer: RendererSpec = RendererSpec()
    context_tokens: Annotated[int | None, Field(ge=16, le=100_000_000)] = None


class Policy(Record):
    """``labels`` maps what backends call their weights to our integer version."""

    spec: PolicySpec
    version: int = 0
    paused: bool = False
    labels: dict[str, int] = {}


class BackendKind(StrEnum):
    VLLM = "vllm"
    LOCAL = "local"
    OPENAI = "openai"
    SCRIPTED = "scripted"


class BackendSpec(Record):
    """One inference server. ``url`` is its root, without ``/v1``. ``options`` belong to the kind."""

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    kind: BackendKind = BackendKind.VLLM
    api_key: SecretStr | None = None
    options: JsonObject = {}


class BackendState(StrEnum):
    ACTIVE = "active"
    DRAINING = "draining"
    FAILED = "failed"


class BackendInfo(Record):
    """What probing a backend found. ``logprobs_mode`` is ``processed`` (of the sampled distribution),
    ``raw`` (before temperature and truncation) or ``unknown``."""

    engine: str
    models: list[str]
    context_tokens: int | None = None
    logprobs_mode: str = "unknown"
    reports_versions: bool = False
    warnings: list[str] = []


class Backend(Record):
    id: str
    policy: str
    spec: BackendSpec
    info: BackendInfo
    state: BackendState = BackendState.ACTIVE
    error: str | None = None
