"""Accepting on a socket that listens inside a sandbox, until the sandbox is gone.

Closing a sandbox shuts such a socket (``Sandbox.listen``). An event loop's own server would go on asking it
for connections, busily and for nothing.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

SHORT_S = 0.1
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})
"""Of an accept that may go better in a moment."""


async def accept_all(sock: socket.socket, take: Callable[[socket.socket], Awaitable[object]]) -> None:
    """Hand each connection to ``take``, which owns it and returns at once. Ends when the socket is shut; its
    owner closes it."""
    sock.setblocking(False)
    while True:
        try:
            connection, _ = await asyncio.get_running_loop().sock_accept(sock)
        except OSError as error:
            if error.errno not in _SHORT:
                return
            await asyncio.sleep(SHORT_S)
            continue
        try:
            await take(connection)
        except OSError:  # it is gone already
            connection.close()
