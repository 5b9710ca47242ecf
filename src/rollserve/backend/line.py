"""Those who wait for a place on a backend, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque


class Line:
    """``waits`` is true while someone stands in it, or was called and has not come yet: who comes then
    goes to its end."""

    def __init__(self) -> None:
        self._standing: deque[asyncio.Future[bool]] = deque()
        self._called = 0

    @property
    def waits(self) -> bool:
        return bool(self._standing) or self._called > 0

    async def stand(self, *, first: bool) -> bool:
        """Until it is one's turn (True), or something has changed for all (False). ``first``: one's turn has
        come before, and there was no place after all."""
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if first:
            self._standing.appendleft(place)
        else:
            self._standing.append(place)
        try:
            turn = await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.result():
                self._called -= 1
                self.call(self._called + 1)
            elif place in self._standing:
                self._standing.remove(place)
            raise
        self._called -= turn
        return turn

    def call(self, places: float) -> None:
        """There are so many places in all, those of whom was called already among them."""
        while self._standing and self._called < places:
            place = self._standing.popleft()
            if not place.done():
                self._called += 1
                place.set_result(True)

    def dismiss(self) -> None:
        """Let all look for themselves again."""
        standing, self._standing = self._standing, deque()
        for place in standing:
            if not place.done():
                place.set_result(False)
