"""Request bodies: bounded, read with a deadline, decoded off the event loop when large.

A dependency per model instead of FastAPI's own reading: the framework parses on the event loop, and
its errors lose the position in broken JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from rollserve.api.problems import invalid
from rollserve.errors import InvalidInput, TooLarge, Unavailable
from rollserve.wire import GroupBody, SubmitGroups

M = TypeVar("M", bound=BaseModel)

LARGE_BYTES = 32_768
READ_TIMEOUT_S = 120.0


class BodyBudget:
    """Bounds one body, and all that are being held at once."""

    def __init__(self, max_body_bytes: int, max_total_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._max_total_bytes = max_total_bytes
        self._held_bytes = 0

    async def read(self, request: Request, use: Callable[[bytes], Awaitable[M]]) -> M:
        """Read the body and hand it to ``use``; its bytes are on the budget until that is done."""
        self._check_declared(request)
        taken = 0
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for piece in request.stream():
                    taken += len(piece)
                    self._held_bytes += len(piece)
                    self._check(taken)
                    pieces.append(piece)
            body = b"".join(pieces)
            pieces.clear()
            return await use(body)
        except TimeoutError as error:
            raise InvalidInput(f"the body did not arrive within {READ_TIMEOUT_S:g} s") from error
        finally:
            self._held_bytes -= taken

    def _check_declared(self, request: Request) -> None:
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_body_bytes:
            raise self._too_large()

    def _check(self, taken: int) -> None:
        if taken > self.max_body_bytes:
            raise self._too_large()
        if self._held_bytes > self._max_total_bytes:
            raise Unavailable("too many large requests at once", retry_after_s=2.0)

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"a body may have {self.max_body_bytes} bytes", hint="send less at once (api.max_body_mb)"
        )


def body(model: type[M], *, optional: bool = False) -> Any:
    """The request's body as ``model``; with ``optional`` an empty one is the model's defaults."""

    async def decode(raw: bytes) -> M:
        if optional and not raw:
            return model()
        if len(raw) < LARGE_BYTES:
            return parse(model, raw)
        return await asyncio.to_thread(parse, model, raw)

    async def read(request: Request) -> M:
        budget: BodyBudget = request.app.state.budget
        return await budget.read(request, decode)

    return Depends(read)


def parse(model: type[M], raw: bytes) -> M:
    """Raises ``InvalidInput`` with the field at fault, or the place where the JSON is broken."""
    if not raw:
        raise InvalidInput("a JSON body is needed", hint=f"fields: {', '.join(model.model_fields)}")
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise invalid(error, model) from error


class _RawGroups(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[msgspec.Raw]


def parse_groups(raw: bytes) -> SubmitGroups:
    """A large submit, group by group: one decoder call over all of it would hold the interpreter for
    longer than the event loop may wait."""
    if len(raw) < LARGE_BYTES:
        return parse(SubmitGroups, raw)
    try:
        items = msgspec.json.decode(raw, type=_RawGroups).groups
    except RecursionError as error:
        raise InvalidInput("Invalid JSON: nested too deep") from error
    except msgspec.ValidationError:
        return parse(SubmitGroups, raw)  # says better what is wrong
    except msgspec.DecodeError as error:
        raise InvalidInput(f"Invalid JSON: {error}") from error
    if not items:
        return parse(SubmitGroups, raw)
    groups: list[GroupBody] = []
    for index, item in enumerate(items):
        try:
            groups.append(GroupBody.model_validate_json(bytes(item)))
        except ValidationError as error:
            raise invalid(error, GroupBody, f"groups.{index}") from error
    return SubmitGroups.model_construct(groups=groups)


def groups_body() -> Any:
    """``SubmitGroups``, however large."""

    async def decode(raw: bytes) -> SubmitGroups:
        if len(raw) < LARGE_BYTES:
            return parse_groups(raw)
        return await asyncio.to_thread(parse_groups, raw)

    async def read(request: Request) -> SubmitGroups:
        budget: BodyBudget = request.app.state.budget
        return await budget.read(request, decode)

    return Depends(read)
