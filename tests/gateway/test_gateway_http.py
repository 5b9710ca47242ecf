"""The gateway over a real socket, with the official client and with raw requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from rollserve.backend.base import GenerateRequest, Generation
from rollserve.errors import BackendError, BackendUnavailable
from rollserve.gateway.base import Ending
from rollserve.gateway.sessions import GatewaySession
from rollserve.records.call import unpack_ids

from .conftest import SHELL, World, eventually
from .serving import http_client, serving

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [SHELL]


@pytest.fixture
async def served(world: World) -> AsyncIterator[World]:
    async with serving(world):
        yield world


def official(session: GatewaySession, base_url: str | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=session.secret,
        base_url=base_url or session.base_url,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )


@pytest.fixture
async def session(served: World) -> GatewaySession:
    return await served.open()


@pytest.fixture
async def client(session: GatewaySession) -> AsyncIterator[openai.AsyncOpenAI]:
    async with official(session) as made:
        yield made


@pytest.fixture
async def raw(session: GatewaySession) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {session.secret}"}
    async with http_client(base_url=session.base_url, headers=headers) as made:
        yield made


async def test_a_tool_conversation_with_the_official_client(
    served: World, session: GatewaySession, client: openai.AsyncOpenAI
) -> None:
    served.pool.script = served.says(f"<think>\nhm\n</think>\n\nlook\n{CALL}", "done")
    first = await client.chat.completions.create(model="m", messages=HI, tools=TOOLS, temperature=0.3)
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "look")
    assert choice.message.model_extra == {"reasoning_content": "hm"}
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("shell", '{"command": "ls"}')
    # the official client sends the turn back without its reasoning
    history = [
        *HI,
        choice.message.model_dump(exclude={"reasoning_content"}),
        {"role": "tool", "tool_call_id": call.id, "content": "out"},
    ]
    second = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
    assert second.choices[0].message.content == "done"
    assert second.choices[0].finish_reason == "stop"
    one, two = served.segments[0].calls
    assert (two.parent, two.broke) == (one.id, None)
    assert one.asked == {"temperature": 0.3}
    assert one.sampling.temperature == 1.0
    assert first.id == f"chatcmpl-{one.id}"
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(served.pool.requests[1].token_ids)
    assert second.usage.completion_tokens == len(unpack_ids(two.sampled_ids))


TEXTS = [
    "plain words, with ünïcödé and 字 and 🙂 in them",
    "  outer blanks \n\n and inner ones  ",
    "<think>\nfirst\n</think>\n\nthen 🙂",
    f"some text\n{CALL}",
    f"<think>\nhm\n</think>\n\n{CALL}",
    "<think>\nnever closed",
    "text <think> later</think> more",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
async def test_a_stream_gives_what_the_whole_answer_gives(
    served: World, client: openai.AsyncOpenAI, text: str
) -> None:
    served.pool.script = served.says(text)
    whole = (await client.chat.completions.create(model="m", messages=HI, tools=TOOLS)).choices[0]
    stream = await client.chat.completions.create(
        model="m", messages=HI, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    content, reasoning, calls, finish, usage = "", "", [], None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    assert content == (whole.message.content or "")
    assert reasoning == (whole.message.model_extra or {}).get("reasoning_content", "")
    assert [(c.function.name, c.function.arguments) for c in calls if c.function] == [
        (c.function.name, c.function.arguments)
        for c in whole.message.tool_calls or []
        if c.type == "function"
    ]
    assert finish == whole.finish_reason
    assert usage is not None
    assert usage.completion_tokens == len(served.ids(text))
    assert served.segments[0].calls[1].first_token_at is not None


async def test_text_streams_while_it_is_sampled(served: World, client: openai.AsyncOpenAI) -> None:
    """The last token is held back until the client has read the text before it."""
    read = asyncio.Event()
    served.pool.script = served.says("one two")
    last = len(served.ids("one two")) - 2

    async def pace(index: int) -> None:
        if index == last:
            await read.wait()

    served.pool.pace = pace
    stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
    got = ""
    async for chunk in stream:
        got += chunk.choices[0].delta.content or ""
        if got.startswith("one"):
            assert read.is_set() or not served.segments[0].calls
            read.set()
    assert got == "one two"


async def test_the_end_of_a_stream_waits_for_the_record(served: World, raw: httpx.AsyncClient) -> None:
    served.segments[0].broken = OSError(28, "No space left on device")
    read = asyncio.Event()

    async def pace(index: int) -> None:
        await read.wait()

    served.pool.pace = pace
    text = ""
    body = {"model": "m", "messages": HI, "stream": True}
    async with raw.stream("POST", "/chat/completions", json=body) as response:
        async for part in response.aiter_text():
            text += part
            if '"content":"o' in text:
                read.set()
    assert '"content":"o' in text
    assert 'finish_reason":"stop' not in text
    assert "[DONE]" not in text
    assert '"code":"infrastructure_failure"' in text


async def test_a_waiting_stream_is_kept_alive(served: World, raw: httpx.AsyncClient) -> None:
    served.pool.gate = asyncio.Event()
    body = {"model": "m", "messages": HI, "stream": True}
    async with raw.stream("POST", "/chat/completions", json=body) as response:
        lines, empty = response.aiter_lines(), 0
        async for line in lines:
            empty += '"delta":{"content":""}' in line
            if empty == 2:
                break
        served.pool.gate.set()
        rest = [line async for line in lines]
    assert "data: [DONE]" in rest


async def test_logprobs_on_request(served: World, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="m", messages=HI, logprobs=True)
    block = answer.choices[0].logprobs
    assert block is not None
    assert [entry.logprob for entry in block.content or []] == served.generation("ok").logprobs
    assert "".join(entry.token for entry in block.content or []) == "ok<|im_end|>"
    plain = await client.chat.completions.create(model="m", messages=HI)
    assert plain.choices[0].logprobs is None


async def test_the_model_and_the_health(served: World, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    async with http_client() as anyone:
        assert (await anyone.get(f"{served.service.base_url}/healthz")).json() == {"status": "ok"}


async def test_a_prefix_names_a_session(served: World, raw: httpx.AsyncClient) -> None:
    assert "/s/ses_" in str(raw.base_url)
    for base_url in (str(raw.base_url).rstrip("/"), f"{served.service.base_url}/v1"):
        answer = await raw.post(f"{base_url}/chat/completions", json={"messages": HI})
        assert answer.status_code == 200
        assert answer.json()["model"] == "tiny"


@pytest.mark.parametrize("path", ["/nothing", "/v1/chat", "/s/a/other"])
async def test_paths_that_are_not_there(served: World, raw: httpx.AsyncClient, path: str) -> None:
    answer = await raw.get(served.service.base_url + path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_the_wrong_method(raw: httpx.AsyncClient) -> None:
    answer = await raw.get("/chat/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


# -- who may


MISSING = ("unauthenticated", "send it as 'Authorization: Bearer SECRET'")
UNKNOWN = ("unknown_secret", "no session has this secret")


@pytest.mark.parametrize("prefix", ["own", "/v1", "/s/ses_unknown/v1"])
@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, MISSING),
        ({"authorization": ""}, MISSING),
        ({"authorization": "Bearer"}, MISSING),
        ({"authorization": "Basic abc"}, MISSING),
        ({"x-api-key": ""}, MISSING),
        ({"authorization": "Bearer wrong"}, UNKNOWN),
        ({"authorization": "Bearer \xff\xfe"}, UNKNOWN),
        ({"x-api-key": "wrong"}, UNKNOWN),
        ({"x-goog-api-key": "wrong"}, UNKNOWN),
    ],
)
async def test_without_the_sessions_secret(
    served: World, session: GatewaySession, headers: dict[str, str], wanted: tuple[str, str], prefix: str
) -> None:
    sent = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    base_url = session.base_url if prefix == "own" else served.service.base_url + prefix
    async with http_client(base_url=base_url) as stranger:
        for request in (
            stranger.build_request("POST", "/chat/completions", json={"messages": HI}, headers=sent),
            stranger.build_request("GET", "/models", headers=sent),
        ):
            answer = await stranger.send(request)
            error = answer.json()["error"]
            assert answer.status_code == 401
            assert wanted[1] in error["message"]
            if "x-goog-api-key" in headers and request.method == "GET":
                assert error["status"] == "UNAUTHENTICATED"
            else:
                assert (error["type"], error["code"]) == ("authentication_error", wanted[0])
    assert served.pool.requests == []


@pytest.mark.parametrize("header", ["x-api-key", "x-goog-api-key"])
async def test_the_secret_in_the_header_of_another_dialect(session: GatewaySession, header: str) -> None:
    async with http_client(base_url=session.base_url, headers={header: session.secret}) as one:
        assert (await one.get("/models")).status_code == 200
        basic = {"authorization": "Basic abc"}
        assert (await one.get("/models", headers=basic)).status_code == 200


@pytest.mark.parametrize("ending", list(Ending))
@pytest.mark.parametrize("stream", [False, True])
async def test_after_the_session_has_ended(
    session: GatewaySession, client: openai.AsyncOpenAI, ending: Ending, stream: bool
) -> None:
    """400: the official client does not try again, and agents stop."""
    await session.close(ending)
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match=ending.value) as caught:
            await client.chat.completions.create(model="m", messages=HI, stream=stream)
        assert caught.value.code == "session_closed"
    with pytest.raises(openai.BadRequestError):
        await client.models.list()


@pytest.mark.parametrize("other", ["open", "over", "none"])
async def test_anothers_address_tells_nothing_of_the_other(
    served: World, session: GatewaySession, other: str
) -> None:
    theirs = await served.open()
    if other == "over":
        await theirs.close()
    name = "ses_none" if other == "none" else theirs.id
    async with official(session, f"{served.service.base_url}/s/{name}/v1") as client:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.chat.completions.create(model="m", messages=HI)
    assert caught.value.code == "anothers_session"
    assert caught.value.body == {
        "message": "the secret is not that of the session in the path (use the base URL it came with)",
        "type": "permission_error",
        "param": None,
        "code": "anothers_session",
    }
    assert served.pool.requests == []


async def test_another_sessions_secret_reaches_that_session_only(
    served: World, session: GatewaySession
) -> None:
    other = await served.open()
    async with official(other) as theirs:
        await theirs.chat.completions.create(model="m", messages=HI)
    assert session.call_ids == []
    assert len(other.call_ids) == 1


# -- bad input


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[" * 100_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\xff\xfe"],
)
async def test_broken_bodies(raw: httpx.AsyncClient, body: bytes) -> None:
    answer = await raw.post("/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body"


async def test_a_body_that_says_it_is_too_large(raw: httpx.AsyncClient) -> None:
    answer = await raw.post("/chat/completions", content=b"x" * 1_000_001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


async def test_a_body_of_fifty_megabytes_that_does_not_say_so(session: GatewaySession) -> None:
    """Chunked, so that only reading tells; the server stops reading at its limit."""
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(50):
            sent += 1
            yield b"x" * 1_000_000

    headers = {"authorization": f"Bearer {session.secret}"}
    async with http_client(base_url=session.base_url, headers=headers) as one:
        try:
            answer = await one.post("/chat/completions", content=chunks())
        except httpx.TransportError:
            assert sent < 50  # the connection was closed on the sender
        else:
            assert answer.status_code == 413


async def test_unsupported_parameters_are_named(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=HI, extra_body={"functions": []})
    assert caught.value.param == "functions"


async def test_a_prompt_over_the_context_has_openais_code(served: World, client: openai.AsyncOpenAI) -> None:
    served.view(context_tokens=4)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=HI)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_used_up_budget_is_not_worth_another_try(served: World, stream: bool) -> None:
    session = await served.open(limits={"max_turns": 1})
    async with official(session) as client:
        await client.chat.completions.create(model="m", messages=HI)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=HI, stream=stream)
    assert caught.value.code == "limit_reached"


@pytest.mark.parametrize(
    ("error", "status"),
    [(BackendError("x"), 502), (BackendUnavailable("x"), 503), (ZeroDivisionError(), 500)],
)
async def test_failures_behind_the_gateway(
    served: World, client: openai.AsyncOpenAI, error: Exception, status: int
) -> None:
    def broken(request: GenerateRequest) -> Generation:
        raise error

    served.pool.script = broken
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="m", messages=HI)
    assert caught.value.status_code == status


# -- who goes away


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_stops_its_generation(
    served: World, raw: httpx.AsyncClient, stream: bool
) -> None:
    served.pool.gate = asyncio.Event()
    body = {"messages": HI, "stream": stream}
    request = asyncio.create_task(raw.post("/chat/completions", json=body))
    await served.pool.started.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await raw.aclose()
    await eventually(lambda: served.pool.aborted)
    await eventually(lambda: not served.service.stats()["in_flight"])
    assert served.segments[0].calls == []


async def test_a_session_that_ends_under_a_request(
    served: World, session: GatewaySession, client: openai.AsyncOpenAI
) -> None:
    served.pool.gate = asyncio.Event()
    request = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
    await served.pool.started.wait()
    await session.close(Ending.CANCELLED)
    with pytest.raises(openai.BadRequestError, match="its attempt was cancelled") as caught:
        await request
    assert caught.value.code == "session_closed"
