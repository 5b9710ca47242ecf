"""What waits: event streams and leases, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import httpx
import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from rollserve.api.events import EventStream
from rollserve.testing.server_room import Room

POLICY = {"name": "pol", "model": "m", "tokenizer": "tiny"}
GROUPS = {"groups": [{"task": {"instruction": "act", "grader": {"name": "exact"}}}]}


async def open_run(api: httpx.AsyncClient) -> str:
    await api.post("/v1/policies", json=POLICY)
    return str((await api.post("/v1/runs", json={"policy": "pol"})).json()["id"])


async def events(
    api: httpx.AsyncClient, *, headers: dict[str, str] | None = None, **params: str | int
) -> AsyncGenerator[tuple[int, str], None]:
    """Id and type of each event, checked against its record."""
    async with api.stream("GET", "/v1/events", params=params, headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        frame: dict[str, str] = {}
        async for line in answer.aiter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                frame[name] = value
                continue
            if frame:
                record = msgspec.json.decode(frame["data"])
                assert (record["seq"], record["type"]) == (int(frame["id"]), frame["event"])
                yield record["seq"], record["type"]
                frame = {}


async def some(stream: AsyncIterator[tuple[int, str]], until: str) -> list[tuple[int, str]]:
    seen = []
    async with asyncio.timeout(20):
        async for event in stream:
            seen.append(event)
            if event[1] == until:
                break
    return seen


async def test_events_come_as_they_happen_and_a_cursor_survives_a_reconnect(
    served: httpx.AsyncClient,
) -> None:
    run = await open_run(served)
    async with aclosing(events(served)) as stream:
        before = await some(stream, "run.opened")
        await served.post(f"/v1/runs/{run}/groups", json=GROUPS)
        first = await some(stream, "group.submitted")
    cursor = first[-1][0]
    await served.post(f"/v1/runs/{run}/groups", json=GROUPS)
    async with aclosing(events(served, after=cursor)) as stream:
        second = await some(stream, "group.submitted")
    async with aclosing(events(served, headers={"Last-Event-ID": str(cursor)})) as stream:
        assert await some(stream, "group.submitted") == second
    seen = [number for number, _ in (*before, *first, *second)]
    assert seen == list(range(1, len(seen) + 1))


async def test_events_of_one_run(served: httpx.AsyncClient) -> None:
    one = await open_run(served)
    two = (await served.post("/v1/runs", json={"policy": "pol", "name": "two"})).json()["id"]
    for run in (one, two):
        await served.post(f"/v1/runs/{run}/groups", json=GROUPS)
    async with aclosing(events(served, run_id=two)) as stream:
        seen = await some(stream, "group.finished")
    assert [kind for _, kind in seen].count("run.opened") == 1
    assert [kind for _, kind in seen].count("group.submitted") == 1


async def test_streams_end_when_the_server_stops(served: httpx.AsyncClient, room: Room) -> None:
    await open_run(served)
    async with aclosing(events(served)) as stream:
        await some(stream, "run.opened")
        room.core.begin_stop()
        async with asyncio.timeout(20):
            assert [event async for event in stream if event[1] == "never"] == []


class Reader:
    """An ASGI client that takes messages until it stops."""

    def __init__(self, takes: int) -> None:
        self.got: list[Message] = []
        self._takes = takes

    async def send(self, message: Message) -> None:
        if len(self.got) >= self._takes:
            await asyncio.Event().wait()
        self.got.append(message)

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError


async def run_stream(stream: EventStream, reader: Reader) -> None:
    scope: Scope = {"type": "http"}
    receive: Receive = reader.receive
    send: Send = reader.send
    async with asyncio.timeout(20):
        await stream(scope, receive, send)


async def test_a_reader_that_takes_nothing_is_cut_off(room: Room) -> None:
    reader = Reader(takes=2)
    await room.run()
    await run_stream(EventStream(room.core, 0, None, send_timeout_s=0.01), reader)
    assert [message["type"] for message in reader.got] == ["http.response.start", "http.response.body"]
    assert room.core.events.readers == 0


async def test_a_quiet_stream_is_kept_alive(room: Room) -> None:
    reader = Reader(takes=4)
    await run_stream(EventStream(room.core, 10_000, None, keep_alive_s=0.01, send_timeout_s=0.05), reader)
    assert [message["body"] for message in reader.got[2:]] == [b": keep-alive\n\n"] * 2


async def test_too_many_streams(
    served: httpx.AsyncClient, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.core.events, "_most", 1)
    await open_run(served)
    async with aclosing(events(served)) as stream:
        await some(stream, "run.opened")
        answer = await served.get("/v1/events")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    await room.until(lambda: room.core.events.readers == 0)


async def test_a_lease_waits_and_a_client_that_leaves_takes_nothing(
    served: httpx.AsyncClient, room: Room
) -> None:
    run = await open_run(served)
    where = f"/v1/runs/{run}/deliveries"
    leaving = asyncio.create_task(served.post(where, json={"wait_s": 30}))
    await room.until(lambda: room.core.deliveries.waiting == 1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await room.until(lambda: room.core.deliveries.waiting == 0)
    staying = asyncio.create_task(served.post(where, json={"wait_s": 30}))
    await room.until(lambda: room.core.deliveries.waiting == 1)
    await served.post(f"/v1/runs/{run}/groups", json=GROUPS)
    assert len((await staying).json()["groups"]) == 1


async def test_waiting_leases_are_answered_when_the_server_stops(
    served: httpx.AsyncClient, room: Room
) -> None:
    run = await open_run(served)
    waiting = asyncio.create_task(served.post(f"/v1/runs/{run}/deliveries", json={"wait_s": 30}))
    await room.until(lambda: room.core.deliveries.waiting == 1)
    room.core.begin_stop()
    assert (await waiting).json()["lease"] is None
