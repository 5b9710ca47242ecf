"""Events as server-sent events: the cursor of each is its ``id``, and a reader that comes back with the
last one it saw (``Last-Event-ID``, or ``after``) misses nothing."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.types import Receive, Scope, Send

from rollserve.api.parts import Core, StrictRoute, disconnected
from rollserve.errors import InvalidInput
from rollserve.rollouts.bell import heard
from rollserve.rollouts.coordinator import Coordinator
from rollserve.rollouts.events import FeedEvent

MAX_CURSOR = 10**18
KEEP_ALIVE_S = 15.0
SEND_TIMEOUT_S = 30.0
"""A reader that takes nothing for so long is cut off; it can come back with its cursor."""


class EventStream(Response):
    """Follows the feed until the client goes away, is too slow, or the server stops."""

    def __init__(
        self,
        core: Coordinator,
        after: int,
        run_id: str | None,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        self._core = core
        self._after = after
        self._run_id = run_id
        self._keep_alive_s = keep_alive_s
        self._send_timeout_s = send_timeout_s
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._core.events.reader():
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            watchers = [
                asyncio.create_task(self._follow(send)),
                asyncio.create_task(disconnected(receive)),
                asyncio.create_task(self._closing()),
            ]
            try:
                await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for watcher in watchers:
                    watcher.cancel()
                await asyncio.gather(*watchers, return_exceptions=True)
        if self._core.closing.is_set():
            await self._send(send, b"", more=False)

    async def _closing(self) -> None:
        await self._core.closing.wait()

    async def _follow(self, send: Send) -> None:
        await self._send(send, b": events\n\n")
        while True:
            fresh = self._core.events.listen()
            events, following = await self._core.events.read(self._after, self._run_id)
            if events:
                await self._send(send, b"".join(_frame(event) for event in events))
            moved, self._after = following > self._after, following
            if not moved and not await heard(fresh, self._keep_alive_s):
                await self._send(send, b": keep-alive\n\n")

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})


def _frame(event: FeedEvent) -> bytes:
    return f"id: {event.seq}\nevent: {event.type}\ndata: {event.json}\n\n".encode()


async def stream(
    request: Request,
    core: Core,
    after: Annotated[
        int | None, Query(ge=0, le=MAX_CURSOR, description="Only events numbered higher.")
    ] = None,
    run_id: Annotated[str | None, Query(max_length=256)] = None,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
) -> Response:
    """Events from a cursor on, oldest first, then as they happen."""
    if last_event_id is not None:
        if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19):
            raise InvalidInput("not the id of an event", field="Last-Event-ID")
        after = int(last_event_id)
    await core.events.check_cursor(after or 0, "after" if last_event_id is None else "Last-Event-ID")
    if run_id is not None:
        await core.runs.get(run_id)
    core.events.check_room()
    return EventStream(core, after or 0, run_id)


def router() -> APIRouter:
    routes = APIRouter(tags=["events"], prefix="/v1", route_class=StrictRoute)
    routes.add_api_route("/events", stream, methods=["GET"], response_model=None,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}})  # fmt: skip
    return routes
