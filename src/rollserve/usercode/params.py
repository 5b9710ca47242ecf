"""The parameters of what worker and host ask of each other, one struct per operation.

Worker → host: ``describe``, ``agent``, ``grade``, ``tool``, ``function``. Host → worker: ``chat``,
``tool`` (of an agent), ``sandbox.exec``, ``sandbox.read_file``, ``sandbox.write_file``. What models
and users wrote crosses as JSON text: msgpack can't hold an integer past 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollserve.records.call import Message
from rollserve.usercode.base import Role


class Describe(msgspec.Struct, frozen=True):
    path: str
    role: Role


class RunAgent(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    options_json: bytes
    task_json: bytes
    schemas: list[dict[str, Any]]
    base_url: str
    api_key: str


class RunGrader(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    options_json: bytes
    task_json: bytes
    answer: str | None
    conversation: tuple[Message, ...]
    call_ids: tuple[str, ...]
    sandbox_id: str | None


class RunTool(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    arguments_json: bytes
    sandbox_id: str | None


class RunFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A plain function of ours, called by name with JSON arguments; answers with JSON."""

    path: str
    arguments_json: bytes


class Json(msgspec.Struct, frozen=True):
    data: bytes


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None


class ToolCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class Exec(msgspec.Struct, frozen=True):
    command: str
    timeout_s: float
    output_limit_bytes: int


class ReadFile(msgspec.Struct, frozen=True):
    path: str
    limit_bytes: int


class WriteFile(msgspec.Struct, frozen=True):
    path: str
    data: bytes
