"""The bytes of bodies that are being read or decoded: bounded, of each session and of all.

One agent may send many large bodies at once, and as slowly as it likes. What it may hold so is a part of
what all may hold, so that it meets its own bound before others meet it with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollserve.errors import Unavailable
from rollserve.gateway.asgi import Receive, read_body

OF_A_SESSION = 2
OF_ALL = 8
"""Times the largest body."""


class Bodies:
    """Those of one application. ``body_s`` is how long a body may take to arrive."""

    def __init__(self, max_body_bytes: int, body_s: float) -> None:
        self._max_body_bytes = max_body_bytes
        self._body_s = body_s
        self._held: dict[str, int] = {}
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, session_id: str, headers: dict[str, str], receive: Receive) -> AsyncIterator[bytes]:
        """A body of the session's; its bytes count until the block is left. Raises ``TooLarge``,
        ``Unavailable`` where it does not arrive in time or too much is held, ``Gone``."""
        taken = 0

        def take(size_bytes: int) -> None:
            nonlocal taken
            taken += size_bytes
            self._take(session_id, size_bytes)

        try:
            yield await read_body(headers, receive, self._max_body_bytes, self._body_s, take)
        finally:
            self._give_back(session_id, taken)

    def _take(self, session_id: str, size_bytes: int) -> None:
        """Beyond the bound they are held as well, until they are given back."""
        self.held_bytes += size_bytes
        held = self._held[session_id] = self._held.get(session_id, 0) + size_bytes
        most = self._max_body_bytes
        if held > OF_A_SESSION * most or self.held_bytes > OF_ALL * most:
            raise Unavailable("too many large requests at once", field="body")

    def _give_back(self, session_id: str, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        left = self._held.get(session_id, 0) - size_bytes
        if left > 0:
            self._held[session_id] = left
        else:
            self._held.pop(session_id, None)
