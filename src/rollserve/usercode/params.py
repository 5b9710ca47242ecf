"""The parameters of what worker and host ask of each other, one struct per operation.

Worker → host: ``describe``, ``load``, ``agent``, ``grade``, ``tool``, ``function``. Host → worker: ``chat``,
``show``, ``tool`` (of an agent), ``sandbox.exec``, ``sandbox.read_file``, ``sandbox.write_file``, and of an
agent ``sandbox.snapshot``, ``sandbox.fork``, ``sandbox.forward``, ``sandbox.close``. What models
and users wrote crosses as JSON text: msgpack can't hold an integer past 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollserve.records.call import Message
from rollserve.records.image import Image
from rollserve.usercode.base import Role, Stamp


class Describe(msgspec.Struct, frozen=True):
    path: str
    role: Role


class Load(msgspec.Struct, frozen=True):
    """Import ``paths`` of files that were ``files`` when they were described."""

    paths: tuple[str, ...]
    files: dict[str, Stamp | None]


class RunAgent(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    options_json: bytes
    task_json: bytes
    schemas: list[dict[str, Any]]
    sandbox_id: str | None
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
    has_model: bool = False


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
    model: str | None = None


class Show(msgspec.Struct, frozen=True, kw_only=True):
    """``data``, or the address ``url``."""

    data: bytes | None = None
    url: str = ""
    media_type: str
    model: str | None = None

    @classmethod
    def of(cls, data: bytes | str, media_type: str, model: str | None) -> Show:
        if isinstance(data, str):
            return cls(url=data, media_type=media_type, model=model)
        return cls(data=data, media_type=media_type, model=model)


class Shown(msgspec.Struct, frozen=True):
    image: Image | None


class ToolCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class Exec(msgspec.Struct, frozen=True):
    sandbox_id: str
    command: str
    timeout_s: float
    output_limit_bytes: int


class ReadFile(msgspec.Struct, frozen=True):
    sandbox_id: str
    path: str
    limit_bytes: int


class WriteFile(msgspec.Struct, frozen=True):
    sandbox_id: str
    path: str
    data: bytes


class OfSandbox(msgspec.Struct, frozen=True):
    """To keep a sandbox, or to close one."""

    sandbox_id: str


class Fork(msgspec.Struct, frozen=True):
    snapshot: str


class ForwardPort(msgspec.Struct, frozen=True):
    sandbox_id: str
    port: int
    tcp: bool
