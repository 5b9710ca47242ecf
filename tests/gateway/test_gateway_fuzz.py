"""Broken requests of every dialect over a real socket: an answer each time, and never a 500."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollserve.testing.dialect_cases import BROKEN_BODIES, documents, mutated

from .conftest import World
from .serving import http_client, serving

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
CYCLE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "be good"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "out"},
            ],
            "tools": [{"type": "function", "function": {"name": "shell", "parameters": PARAMETERS}}],
            "stream": False,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "n": 2,
            "stop": ["x"],
            "max_tokens": 100,
            "response_format": {"type": "text"},
            "tool_choice": "auto",
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "model": "m",
            "instructions": "be good",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
                {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "out"},
            ],
            "tools": [{"type": "function", "name": "shell", "parameters": PARAMETERS, "strict": False}],
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"summary": "auto"},
            "stream": False,
            "store": False,
            "text": {"format": {"type": "text"}},
            "max_output_tokens": 100,
            "previous_response_id": None,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 100,
            "system": [{"type": "text", "text": "be good", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "abc"},
                        {"type": "tool_use", "id": "c", "name": "shell", "input": {}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "out"}]},
            ],
            "tools": [{"name": "shell", "input_schema": PARAMETERS}],
            "stream": False,
            "stop_sequences": ["x"],
            "thinking": {"type": "adaptive"},
            "tool_choice": {"type": "auto"},
        },
    ),
    "generate_content": (
        "/v1beta/models/m:generateContent",
        {
            "systemInstruction": {"role": "user", "parts": [{"text": "be good"}]},
            "contents": [
                {"role": "user", "parts": [{"text": "hi"}]},
                {
                    "role": "model",
                    "parts": [
                        {"text": "hm", "thought": True},
                        {"functionCall": {"name": "shell", "args": {}}, "thoughtSignature": "abc"},
                    ],
                },
                {
                    "role": "user",
                    "parts": [{"functionResponse": {"name": "shell", "response": {"output": "out"}}}],
                },
            ],
            "tools": [{"functionDeclarations": [{"name": "shell", "parametersJsonSchema": PARAMETERS}]}],
            "generationConfig": {"maxOutputTokens": 100, "stopSequences": ["x"], "candidateCount": 1},
        },
    ),
}
COUNTS = {
    "messages": "/v1/messages/count_tokens",
    "responses": "/v1/responses/input_tokens",
    "generate_content": "/v1beta/models/m:countTokens",
}

examples = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.differing_executors,
    ],
)


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    world.pool.script = world.says("<think>\nhm\n</think>\n\nok")
    async with serving(world) as base_url:
        session = await world.open(limits={"max_turns": 10_000, "max_sampled_tokens": 10_000_000})
        headers = {"authorization": f"Bearer {session.secret}"}
        async with http_client(base_url=base_url, headers=headers) as made:
            yield made


def told(answer: httpx.Response) -> None:
    """It was served, or refused with the reason."""
    assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text)
    if answer.status_code == 200:
        return
    error = answer.json()["error"]
    assert error["message"]
    assert "internal" not in str(error.get("code", ""))


def encoded(document: Any) -> bytes:
    """What a careless client sends, lone surrogates as escapes."""
    return json.dumps(document).encode()


@pytest.mark.parametrize("name", list(REQUESTS))
async def test_the_requests_are_good_ones(client: httpx.AsyncClient, name: str) -> None:
    path, document = REQUESTS[name]
    answer = await client.post(path, json=document)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", list(REQUESTS))
async def test_broken_bodies(client: httpx.AsyncClient, name: str) -> None:
    for body in BROKEN_BODIES:
        for path in (REQUESTS[name][0], COUNTS.get(name, "/v1/chat/completions")):
            answer = await client.post(path, content=body)
            told(answer)
            assert answer.status_code == 400, (path, body[:50])


@examples
@given(data=st.data())
@pytest.mark.parametrize("name", list(REQUESTS))
async def test_requests_with_something_wrong(
    client: httpx.AsyncClient, name: str, data: st.DataObject
) -> None:
    path, document = REQUESTS[name]
    body = encoded(data.draw(mutated(document)))
    told(await client.post(data.draw(st.sampled_from([path, COUNTS.get(name, path)])), content=body))


@examples
@given(document=documents())
@pytest.mark.parametrize("name", list(REQUESTS))
async def test_any_json(client: httpx.AsyncClient, name: str, document: Any) -> None:
    told(await client.post(REQUESTS[name][0], content=encoded(document)))


HARD_TEXTS = ["\x00", "<|im_end|>", "<think>", "\ud83d", "𝕱" * 1000, " " * 5000]


@pytest.mark.parametrize("name", list(REQUESTS))
@pytest.mark.parametrize("text", HARD_TEXTS)
async def test_hard_texts(world: World, client: httpx.AsyncClient, name: str, text: str) -> None:
    """Control tokens in a text are text; half of a surrogate pair is refused."""
    path, document = REQUESTS[name]
    body = encoded(document).replace(b'"hi"', json.dumps(text).encode())
    answer = await client.post(path, content=body)
    told(answer)
    assert answer.status_code == (400 if text == "\ud83d" else 200)


@pytest.mark.parametrize("name", list(REQUESTS))
async def test_many_tools_and_schemas_that_go_in_circles(client: httpx.AsyncClient, name: str) -> None:
    path, document = REQUESTS[name]
    text = json.dumps(document)
    circle = text.replace(json.dumps(PARAMETERS), json.dumps(CYCLE))
    assert circle != text
    assert (await client.post(path, content=circle.encode())).status_code == 200
    key = "functionDeclarations" if name == "generate_content" else None
    tools = document["tools"][0][key] if key else document["tools"]
    many = json.loads(json.dumps(tools)) * 10_000
    wanted = {**document, "tools": [{key: many}] if key else many}
    body = json.dumps(wanted).encode()
    assert (await client.post(path, content=body)).status_code == (413 if len(body) > 1_000_000 else 200)


@pytest.mark.parametrize("name", list(REQUESTS))
async def test_results_of_calls_that_nobody_made(client: httpx.AsyncClient, name: str) -> None:
    path, document = REQUESTS[name]
    text = json.dumps(document)
    for old in ('"tool_call_id": "c"', '"tool_use_id": "c"', '"call_id": "c", "output"'):
        text = text.replace(old, old.replace('"c"', '"other"'))
    told(await client.post(path, content=text.encode()))
