"""Answers: records as JSON, token-heavy ones as JSON or msgpack, encoded off the event loop in pieces.

A decoder or encoder holds the interpreter for as long as one call takes, thread or not. So a large
answer is encoded rollout by rollout, and sent piece by piece as the client takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from rollserve.errors import InvalidInput
from rollserve.store.values import Page
from rollserve.wire import JSON, MSGPACK, Form, Listing

R = TypeVar("R", bound=BaseModel)

PIECE_BYTES = 1 << 20
SEND_TIMEOUT_S = 60.0
"""For one piece; a client that takes nothing for so long is cut off."""

JSON_WEIGHT = 4.0
"""How much larger arrays are as JSON text than as bytes."""


def record(value: BaseModel, status: int = 200) -> Response:
    return Response(value.model_dump_json(), status, media_type=JSON)


def listing(items: Sequence[R], following: str | None = None) -> Response:
    body = ",".join(item.model_dump_json() for item in items)
    cursor = msgspec.json.encode(following).decode()
    return Response(f'{{"items":[{body}],"next":{cursor}}}', media_type=JSON)


def page(found: Page[R]) -> Response:
    return listing(found.items, found.next)


def plain_listing(items: list[Any], following: str | None) -> Response:
    """Of items that are JSON already."""
    return record(Listing[Any](items=items, next=following))


def form_of(request: Request) -> Form:
    """By ``Accept``; JSON unless msgpack is named. Raises ``InvalidInput`` when neither will do."""
    accepted = request.headers.get("accept", "*/*").lower()
    kinds = {part.split(";")[0].strip() for part in accepted.split(",")}
    if kinds & {MSGPACK, "application/x-msgpack"}:
        return "msgpack"
    if kinds & {JSON, "*/*", "application/*", ""}:
        return "json"
    raise InvalidInput(f"can't answer as {accepted!r}", field="Accept", hint=f"{JSON} or {MSGPACK}")


def encode(value: Any, form: Form) -> bytes:
    return msgspec.msgpack.encode(value) if form == "msgpack" else msgspec.json.encode(value)


def array_of(items: Iterable[list[bytes]], count: int, form: Form) -> list[bytes]:
    """An array from encoded items, without copying them into one buffer."""
    if form == "msgpack":
        return [_array_head(count), *(piece for item in items for piece in item)]
    pieces = [b"["]
    for index, item in enumerate(items):
        if index:
            pieces.append(b",")
        pieces.extend(item)
    pieces.append(b"]")
    return pieces


def _array_head(count: int) -> bytes:
    if count < 16:
        return bytes([0x90 | count])
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def map_of(fields: dict[str, list[bytes]], form: Form) -> list[bytes]:
    """A map (of fewer than 16 keys) from encoded values."""
    if form == "msgpack":
        pieces = [bytes([0x80 | len(fields)])]
        for name, value in fields.items():
            pieces += [encode(name, form), *value]
        return pieces
    pieces = []
    for name, value in fields.items():
        pieces += [b"," if pieces else b"{", encode(name, form), b":", *value]
    return [*pieces, b"}"]


class PiecesResponse(Response):
    """A body in encoded pieces; sent as the client takes it."""

    def __init__(self, pieces: list[bytes], form: Form) -> None:
        self._pieces = pieces
        super().__init__(media_type=MSGPACK if form == "msgpack" else JSON)
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for chunk in _chunks(self._pieces):
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _chunks(pieces: list[bytes]) -> Iterable[bytes]:
    """The pieces in chunks of about ``PIECE_BYTES``."""
    gathered: list[bytes] = []
    size = 0
    for piece in pieces:
        for start in range(0, len(piece), PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            gathered.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
