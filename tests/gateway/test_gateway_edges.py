"""What is no call, when a status leaves, and how a connection ends; over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rollserve.backend.base import GenerateRequest, Generation
from rollserve.dialect.clients import NAME_HEADER
from rollserve.errors import BackendUnavailable
from rollserve.gateway.sending import Waits
from rollserve.gateway.sessions import GatewaySession

from .conftest import World, eventually
from .serving import http_client, of_session, serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = "/chat/completions"
SLOW = Waits(hold_s=600.0, keep_alive_s=600.0, grace_s=0.0)


@pytest.fixture
async def served(world: World) -> AsyncIterator[World]:
    async with serving(world):
        yield world


@pytest.fixture
async def session(served: World) -> GatewaySession:
    return await served.open()


@pytest.fixture
async def client(session: GatewaySession) -> AsyncIterator[httpx.AsyncClient]:
    async with of_session(session) as made:
        yield made


# -- what is no call


@pytest.mark.parametrize("path", ["/", "/api/hello", "/s/ses_1/", "/s/ses_1/api/hello"])
async def test_a_greeting_is_answered(served: World, path: str) -> None:
    async with http_client() as anyone:
        answer = await anyone.head(served.service.base_url + path)
        assert (answer.status_code, answer.content) == (200, b"")


async def test_a_web_socket_is_refused_so_that_codex_falls_back(client: httpx.AsyncClient) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    answer = await client.get("/responses", headers=headers)
    assert answer.status_code == 426


FORMS: list[tuple[str, dict[str, str], str]] = [
    ("/v1/nothing", {}, "openai"),
    ("/v1/responses/nothing", {}, "openai"),
    ("/v1/messages/nothing", {}, "anthropic"),
    ("/v1/nothing", {"anthropic-version": "2023-06-01"}, "anthropic"),
    ("/v1beta/nothing", {}, "google"),
    ("/v1beta/models/m:embedContent", {}, "google"),
    ("/nothing", {"x-goog-api-client": "google-genai-sdk/1"}, "google"),
]


def form_of(error: dict[str, Any]) -> str:
    if error.get("type") == "error":
        return "anthropic"
    return "google" if "status" in error["error"] else "openai"


@pytest.mark.parametrize(("path", "headers", "form"), FORMS)
async def test_what_is_not_there_is_told_in_the_nearest_form(
    served: World, path: str, headers: dict[str, str], form: str
) -> None:
    async with http_client() as anyone:
        answer = await anyone.post(served.service.base_url + path, headers=headers)
    assert (answer.status_code, form_of(answer.json())) == (404, form)


@pytest.mark.parametrize(
    ("method", "path", "form"),
    [
        ("GET", "/v1/chat/completions", "openai"),
        ("GET", "/v1/responses", "openai"),
        ("DELETE", "/v1/messages", "anthropic"),
        ("GET", "/v1beta/models/m:generateContent", "google"),
        ("POST", "/v1/models", "openai"),
    ],
)
async def test_another_method(served: World, method: str, path: str, form: str) -> None:
    async with http_client() as anyone:
        answer = await anyone.request(method, served.service.base_url + path)
    assert (answer.status_code, form_of(answer.json())) == (405, form)


async def test_models_are_listed_in_the_form_of_who_asks(session: GatewaySession) -> None:
    async with of_session(session) as one:
        plain = (await one.get("/models")).json()
        theirs = (await one.get("/models", headers={"anthropic-version": "2023-06-01"})).json()
        google = (await one.get("/models", headers={"x-goog-api-client": "x"})).json()
        named = (await one.get("/models/mock-model")).json()
    assert (plain["object"], plain["data"][0]["id"]) == ("list", "tiny")
    assert (theirs["has_more"], theirs["first_id"]) == (False, "tiny")
    assert google["models"][0]["name"] == "models/tiny"
    assert named["id"] == "mock-model", "any name is the policy's"


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 400), ({NAME_HEADER: "mini-swe-agent"}, 401), ({"user-agent": "claude-cli/2"}, 400)],
)
async def test_a_session_that_is_over_meets_the_clients_own_status(
    session: GatewaySession, headers: dict[str, str], status: int
) -> None:
    await session.close()
    async with of_session(session, **headers) as one:
        answer = await one.post(CHAT, json={"messages": HI})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (status, "false")


async def test_a_busy_gateway_says_when_to_come_back(served: World, session: GatewaySession) -> None:
    def broken(request: GenerateRequest) -> Generation:
        raise BackendUnavailable("nothing answers")

    served.pool.script = broken
    async with of_session(session, **{"user-agent": "claude-cli/2"}) as one:
        answer = await one.post(CHAT, json={"messages": HI})
    assert (answer.status_code, answer.headers["retry-after"]) == (529, "1")


# -- when a status leaves


async def test_a_stream_begins_when_a_backend_has_taken_the_call(world: World) -> None:
    """Before its first token."""
    world.pool.gate = asyncio.Event()
    async with serving(world, SLOW):
        session = await world.open()
        body = {"messages": HI, "stream": True}
        async with of_session(session) as one, one.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            parts = response.aiter_text()
            assert '"role":"assistant"' in await anext(parts)
            world.pool.gate.set()
            assert "[DONE]" in "".join([part async for part in parts])


@pytest.mark.parametrize("stream", [False, True])
async def test_until_then_a_failure_has_its_status(world: World, stream: bool) -> None:
    world.pool.gate, world.pool.admits = asyncio.Event(), False

    def broken(request: GenerateRequest) -> Generation:
        raise BackendUnavailable("nothing answers")

    world.pool.script = broken
    async with serving(world, SLOW):
        session = await world.open()
        async with of_session(session) as one:
            asking = asyncio.create_task(one.post(CHAT, json={"messages": HI, "stream": stream}))
            await world.pool.started.wait()
            world.pool.gate.set()
            answer = await asking
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_policy_that_is_paused_holds_the_call_and_says_so_in_time(
    served: World, client: httpx.AsyncClient, stream: bool
) -> None:
    served.view(paused=True)
    async with client.stream("POST", CHAT, json={"messages": HI, "stream": stream}) as response:
        assert response.status_code == 200
        parts = response.aiter_text()
        held = [await anext(parts) for _ in range(3)]
        assert served.pool.requests == []
        served.view()
        rest = "".join([part async for part in parts])
    assert ("[DONE]" in rest) == stream
    assert "".join(held).strip() == "" or stream


# -- what ends in the middle


async def test_an_answer_that_fails_after_its_status_breaks_off_and_is_told_next_time(
    world: World,
) -> None:
    """JSON that has begun has no room for an error; the client that asks again meets its status."""

    def broken(request: GenerateRequest) -> Generation:
        raise BackendUnavailable("nothing answers")

    async with serving(world, Waits(hold_s=0.01, keep_alive_s=0.01, grace_s=600)):
        session = await world.open()
        world.pool.gate, world.pool.script = asyncio.Event(), broken
        async with of_session(session) as one:
            with pytest.raises(httpx.RemoteProtocolError):
                async with one.stream("POST", CHAT, json={"messages": HI}) as response:
                    assert response.status_code == 200
                    world.pool.gate.set()
                    async for _ in response.aiter_text():
                        continue
            assert (await one.post(CHAT, json={"messages": HI})).status_code == 503
            assert len(world.pool.requests) == 1


@pytest.mark.parametrize(("name", "breaks"), [("pi", True), ("qwen-code", False)])
async def test_a_stream_that_fails_ends_as_its_client_takes_it_best(
    served: World, session: GatewaySession, name: str, breaks: bool
) -> None:
    served.pool.gate = asyncio.Event()

    def broken(request: GenerateRequest) -> Generation:
        raise BackendUnavailable("nothing answers")

    served.pool.script = broken
    text, body = "", {"messages": HI, "stream": True}
    named = of_session(session, **{NAME_HEADER: name})
    async with named as one, one.stream("POST", CHAT, json=body) as response:
        served.pool.gate.set()
        try:
            async for part in response.aiter_text():
                text += part
        except httpx.RemoteProtocolError:
            assert breaks
    assert ("nothing answers" in text) != breaks
    assert "[DONE]" not in text


@pytest.mark.parametrize(
    ("name", "bare"), [("gemini-cli", True), ("google-genai", True), ("opencode", False), ("other", False)]
)
async def test_an_error_in_a_stream_of_googles_stands_alone_for_those_who_read_no_other(
    served: World, session: GatewaySession, name: str, bare: bool
) -> None:
    """Its own client takes an error event for an answer that says nothing."""

    def broken(request: GenerateRequest) -> Generation:
        raise BackendUnavailable("nothing answers")

    served.pool.gate, served.pool.script = asyncio.Event(), broken
    body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    path = session.base_url.removesuffix("/v1") + "/v1beta/models/m:streamGenerateContent?alt=sse"
    named = of_session(session, **{NAME_HEADER: name})
    async with named as one, one.stream("POST", path, json=body) as response:
        served.pool.gate.set()
        text = "".join([part async for part in response.aiter_text()])
    *events, told = text.strip().split("\n\n")
    assert all(part.startswith("data: {") for part in events)
    assert told.startswith("{" if bare else "data: {")
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == 503


async def test_a_budget_that_ends_under_a_stream_is_told_even_to_pi(served: World) -> None:
    """A lost connection would only bring it back."""
    session = await served.open(limits={"wall_s": 0.1})
    served.pool.gate = asyncio.Event()
    async with of_session(session, **{NAME_HEADER: "pi"}) as one:
        answer = await one.post(CHAT, json={"messages": HI, "stream": True})
    assert "limit_reached" in answer.text
    await eventually(lambda: served.pool.aborted)


async def test_text_that_comes_fast_is_gathered(served: World, client: httpx.AsyncClient) -> None:
    """Many tokens within the moment become one event each time; nothing is lost."""
    said = " ".join(str(number) for number in range(300))
    served.pool.script = served.says(said)

    async def pace(index: int) -> None:
        await asyncio.sleep(0)

    served.pool.pace = pace
    answer = await client.post(CHAT, json={"messages": HI, "stream": True})
    events = [line for line in answer.text.splitlines() if '"content":"' in line]
    text = "".join(line.partition('"content":"')[2].partition('"')[0] for line in events)
    assert text == said
    assert len(events) < len(served.ids(said)) / 4
