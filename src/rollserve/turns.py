"""Fair turns on the event loop.

Answers of hundreds of sessions arrive together, and what follows each (decode, parse, record, tool,
next prompt) is a millisecond of computing without a break. Run in one iteration of the loop they would
hold up everything else for a second; in turns, nothing waits longer than one of them.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """``take`` returns to one caller in each iteration of the loop, first come first served."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pumping = False

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._pumping:
            self._pumping = True
            loop.call_soon(self._pump, loop)
        await turn

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                break
        if self._waiting:
            loop.call_soon(self._pump, loop)
        else:
            self._pumping = False
