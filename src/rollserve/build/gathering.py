"""Small writes of one turn of the event loop leave together: a head and its body are one packet, not two."""

from __future__ import annotations

import asyncio
from typing import Any

GATHERED_BYTES = 16 << 10
"""What is larger goes at once, so that whoever writes it learns that the connection takes no more."""


class Gathered(asyncio.Transport):
    """A transport whose small writes wait for the turn's end. Closing sends what waits, aborting drops it."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._parts.append(bytes(data))
        self._size += len(data)
        if self._size > GATHERED_BYTES:
            self._flush()
        elif len(self._parts) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._parts.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._size + self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
