"""How server and local workers talk: frames over a Unix socket.

A frame is a 4-byte big-endian length and a msgpack document. The first frame of a connection is a
``Join`` with the secret its worker was given on its standard input; after it, frames are the messages
of ``executor.base``. Writing never blocks and is bounded: whoever is not read for too long is lost.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Final, TypeVar

import msgspec

from rollserve.errors import InfrastructureFailure
from rollserve.executor.base import FromWorker, ToWorker

_HEADER: Final = 4
MAX_FRAME_BYTES: Final = 64 << 20
MAX_JOIN_BYTES: Final = 4096
MAX_UNSENT_BYTES: Final = 64 << 20


class Join(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    secret: str


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is told on its standard input: one line of JSON. Neither the command line
    nor the environment would keep a secret."""

    worker_id: str
    socket: str
    secret: str
    server_pid: int


class ChannelBroken(InfrastructureFailure):
    """The other side sent what is no message, or does not read."""

    code = "channel_broken"


class Channel:
    """One connection. ``closed`` once either side is gone."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._max_unsent_bytes = max_unsent_bytes
        self.overflowed = False
        """The other side did not read, and was dropped for it."""

    @property
    def unsent_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    @property
    def closed(self) -> bool:
        return self._writer.transport.is_closing()

    def write(self, message: msgspec.Struct) -> bool:
        """Hand a frame over; False, and the connection dropped, when the other side does not read."""
        if self.closed:
            return False
        payload = self._encoder.encode(message)
        if len(payload) > MAX_FRAME_BYTES or self.unsent_bytes + len(payload) > self._max_unsent_bytes:
            self.overflowed = True
            self.abort()
            return False
        self._writer.write(len(payload).to_bytes(_HEADER, "big") + payload)
        return True

    async def read(self, limit_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
        """The next frame, None at the end. Raises ``ChannelBroken``."""
        try:
            header = await self._reader.readexactly(_HEADER)
            size = int.from_bytes(header, "big")
            if size > limit_bytes:
                raise ChannelBroken(f"a frame of {size} bytes, over {limit_bytes}", operation="channel.read")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        """Returns when what was written has been handed to the system, or the other side is gone."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return


T = TypeVar("T")


def decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """Raises ``ChannelBroken`` for what is no message."""
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ChannelBroken(f"no message: {error}", operation="channel.read") from error


def to_worker_decoder() -> msgspec.msgpack.Decoder[ToWorker]:
    return msgspec.msgpack.Decoder(ToWorker)


def from_worker_decoder() -> msgspec.msgpack.Decoder[FromWorker]:
    return msgspec.msgpack.Decoder(FromWorker)


async def admit(channel: Channel, expected: dict[str, str]) -> str | None:
    """Read the ``Join`` of a new connection; its worker's id, or None when it is not one of ours.
    ``expected`` are secrets by worker id."""
    try:
        frame = await channel.read(MAX_JOIN_BYTES)
        join = None if frame is None else decode(msgspec.msgpack.Decoder(Join), frame)
    except ChannelBroken:
        return None
    if join is None or not hmac.compare_digest(
        expected.get(join.worker_id, "").encode(), join.secret.encode()
    ):
        return None
    return join.worker_id if join.worker_id in expected else None
