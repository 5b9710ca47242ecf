"""The worker's answers to what hosted code asks of its sandbox and model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rollserve.agent.base import ModelClient
from rollserve.errors import InvalidInput, NotFound, SandboxError
from rollserve.records.call import Message
from rollserve.sandbox.base import ExecResult, Sandbox
from rollserve.usercode import params
from rollserve.usercode.base import Handlers

T = TypeVar("T")

PROBE_S = 10.0


class _Chat(msgspec.Struct, frozen=True, kw_only=True):
    """``params.Chat``, with tools as this side reads them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    model: str | None = None


def decode(data: bytes, kind: type[T]) -> T:
    """Parameters as user code sent them. Raises ``InvalidInput``."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidInput(str(error)) from error


def model_handlers(model: ModelClient) -> Handlers:
    """For code that asks a model."""

    async def chat(data: bytes) -> object:
        order = decode(data, _Chat)
        return await model.chat(
            order.messages, tools=order.tools, max_tokens=order.max_tokens, model=order.model
        )

    async def show(data: bytes) -> object:
        order = decode(data, params.Show)
        given = order.url if order.data is None else order.data
        return params.Shown(await model.show(given, order.media_type, model=order.model))

    return {"chat": chat, "show": show}


def sandbox_handlers(sandbox: Sandbox) -> Handlers:
    """For code that has one sandbox, whatever it calls it."""
    return handlers_over(lambda name: sandbox)


def handlers_over(find: Callable[[str], Sandbox]) -> Handlers:
    """A path that can't be read or written is the calling code's affair (``NotFound``); a sandbox
    that is gone is not (``SandboxError``), and the two look alike until one asks."""

    async def run(data: bytes) -> ExecResult:
        order = decode(data, params.Exec)
        return await find(order.sandbox_id).exec(
            order.command, timeout_s=order.timeout_s, output_limit_bytes=order.output_limit_bytes
        )

    async def read(data: bytes) -> bytes:
        order = decode(data, params.ReadFile)
        sandbox = find(order.sandbox_id)
        try:
            return await sandbox.read_file(order.path, limit_bytes=order.limit_bytes)
        except SandboxError as error:
            await _still_there(sandbox)
            raise NotFound(error.message) from error

    async def write(data: bytes) -> None:
        order = decode(data, params.WriteFile)
        sandbox = find(order.sandbox_id)
        try:
            await sandbox.write_file(order.path, order.data)
        except SandboxError as error:
            await _still_there(sandbox)
            raise NotFound(error.message) from error

    return {"sandbox.exec": run, "sandbox.read_file": read, "sandbox.write_file": write}


async def _still_there(sandbox: Sandbox) -> None:
    """Raises ``SandboxError`` when the sandbox does not answer."""
    await sandbox.exec(":", timeout_s=PROBE_S)
