"""The worker's answers to what hosted code asks of its sandbox."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from rollserve.errors import InvalidInput, NotFound, SandboxError
from rollserve.sandbox.base import ExecResult, Sandbox
from rollserve.usercode import params
from rollserve.usercode.base import Handlers

T = TypeVar("T")

PROBE_S = 10.0


def decode(data: bytes, kind: type[T]) -> T:
    """Parameters as user code sent them. Raises ``InvalidInput``."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidInput(str(error)) from error


def sandbox_handlers(sandbox: Sandbox) -> Handlers:
    """A path that can't be read or written is the calling code's affair (``NotFound``); a sandbox
    that is gone is not (``SandboxError``), and the two look alike until one asks."""

    async def run(data: bytes) -> ExecResult:
        order = decode(data, params.Exec)
        return await sandbox.exec(
            order.command, timeout_s=order.timeout_s, output_limit_bytes=order.output_limit_bytes
        )

    async def read(data: bytes) -> bytes:
        order = decode(data, params.ReadFile)
        try:
            return await sandbox.read_file(order.path, limit_bytes=order.limit_bytes)
        except SandboxError as error:
            await _still_there(sandbox)
            raise NotFound(error.message) from error

    async def write(data: bytes) -> None:
        order = decode(data, params.WriteFile)
        try:
            await sandbox.write_file(order.path, order.data)
        except SandboxError as error:
            await _still_there(sandbox)
            raise NotFound(error.message) from error

    return {"sandbox.exec": run, "sandbox.read_file": read, "sandbox.write_file": write}


async def _still_there(sandbox: Sandbox) -> None:
    """Raises ``SandboxError`` when the sandbox does not answer."""
    await sandbox.exec(":", timeout_s=PROBE_S)
