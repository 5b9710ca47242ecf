"""Each dialect over a real socket, with its provider's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollserve.backend.base import GenerateRequest, Generation
from rollserve.errors import BackendUnavailable
from rollserve.gateway.base import Ending
from rollserve.gateway.sessions import GatewaySession
from rollserve.records.call import unpack_ids

from .conftest import World, eventually
from .official import TALKS, talking
from .serving import serving


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


THOUGHT = "<think>\nhm, 🙂\n</think>\n\n"
ENDS = {
    "chat": ("stop", "tool_calls", "length"),
    "responses": ("completed", "completed", "incomplete"),
    "messages": ("end_turn", "tool_use", "max_tokens"),
    "generate_content": ("FinishReason.STOP", "FinishReason.STOP", "FinishReason.MAX_TOKENS"),
}

TOO_LONG = {
    "chat": "maximum context length",
    "responses": "exceeds the context window",
    "messages": "prompt is too long: ",
    "generate_content": "exceeds the maximum number of tokens allowed (4)",
}


@pytest.fixture
async def served(world: World) -> AsyncIterator[World]:
    async with serving(world):
        yield world


@pytest.fixture
async def session(served: World) -> GatewaySession:
    return await served.open()


@pytest.fixture(params=list(TALKS))
async def talk(request: pytest.FixtureRequest, session: GatewaySession) -> AsyncIterator[Any]:
    async with talking(request.param, session) as made:
        made.name = request.param
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_parallel_calls_is_one_chain(
    served: World, talk: Any, stream: bool
) -> None:
    served.pool.script = served.says(f"{THOUGHT}look\n{call('ls')}\n{call('pwd')}", "all 字 done")
    first = await talk.say(stream=stream)
    assert (first.text, first.reasoning) == ("look", "hm, 🙂")
    assert first.calls == [("shell", {"command": "ls"}), ("shell", {"command": "pwd"})]
    assert first.ended == ENDS[talk.name][1]
    talk.results("a.txt", "/home")
    second = await talk.say(stream=stream)
    assert (second.text, second.calls, second.ended) == ("all 字 done", [], ENDS[talk.name][0])
    one, two = served.segments[0].calls
    assert (two.parent, two.broke, two.inexact) == (one.id, None, None)
    assert second.prompt_tokens == len(served.pool.requests[1].token_ids)
    assert second.sampled_tokens == len(unpack_ids(two.sampled_ids))
    sent = served.tokenizer.decode(served.pool.requests[1].token_ids)
    assert "a.txt" in sent
    assert "/home" in sent


@pytest.mark.parametrize("stream", [False, True])
async def test_a_length_stop(served: World, talk: Any, stream: bool) -> None:
    served.pool.script = served.says("cut off", finish_reason="length")
    assert (await talk.say(stream=stream)).ended == ENDS[talk.name][2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_slow_answer_is_kept_alive(served: World, talk: Any, stream: bool) -> None:
    """Held for many keep-alives, which change nothing."""
    served.pool.gate = asyncio.Event()
    asking = asyncio.create_task(talk.say(stream=stream))
    await served.pool.started.wait()
    await asyncio.sleep(0.1)
    served.pool.gate.set()
    assert (await asking).text == "ok"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context(served: World, talk: Any, stream: bool) -> None:
    served.view(context_tokens=4)
    with pytest.raises(talk.refused) as caught:
        await talk.say(stream=stream)
    assert TOO_LONG[talk.name] in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_that_is_over(session: GatewaySession, talk: Any, stream: bool) -> None:
    await session.close(Ending.CANCELLED)
    with pytest.raises(talk.refused, match="its attempt was cancelled"):
        await talk.say(stream=stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_budget_that_is_used_up(served: World, stream: bool, talk: Any) -> None:
    session = await served.open(limits={"max_turns": 1})
    async with talking(talk.name, session) as one, talking(talk.name, session) as other:
        await one.say()
        with pytest.raises(other.refused, match="turns"):
            await other.say(stream=stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_answers(served: World, talk: Any, stream: bool) -> None:
    def broken(request: GenerateRequest) -> Generation:
        raise BackendUnavailable("nothing answers")

    served.pool.admits = False
    served.pool.script = broken
    with pytest.raises(talk.unavailable, match="nothing answers"):
        await talk.say(stream=stream)


async def test_a_failure_in_the_middle_of_a_stream(served: World, talk: Any) -> None:
    """An error of the client's own, whatever its class: never an answer."""
    served.segments[0].broken = OSError("no space left")

    async def pace(index: int) -> None:
        await asyncio.sleep(0.05)

    served.pool.pace = pace
    with pytest.raises(Exception, match="no space left"):
        await talk.say(stream=True)
    assert served.segments[0].calls == []


async def test_the_models(talk: Any) -> None:
    assert await talk.models() == ["tiny"]


async def test_a_count_is_that_of_the_prompt_and_leaves_nothing(
    served: World, session: GatewaySession
) -> None:
    served.view(context_tokens=4)
    async with talking("messages", session) as messages, talking("generate_content", session) as google:
        counted, plain = await messages.count(), await google.count()
        assert served.pool.requests == []
        served.view(context_tokens=None)
        await messages.say()
    assert counted == len(served.pool.requests[0].token_ids)
    assert 4 < plain < counted, "the tools were not counted"
    assert len(served.segments[0].calls) == 1


# -- several answers


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_siblings(served: World, session: GatewaySession, stream: bool) -> None:
    served.pool.script = served.says("one", "two", f"three\n{call('ls')}")
    async with talking("chat", session) as talk:
        messages: Any = talk.messages
        if stream:
            async with talk.client.chat.completions.stream(model="m", messages=messages, n=3) as events:
                answer: Any = await events.get_final_completion()
        else:
            answer = await talk.client.chat.completions.create(model="m", messages=messages, n=3)
    assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop", "tool_calls"]
    assert [call.parent for call in served.segments[0].calls] == [None] * 3
    assert answer.usage is None or answer.usage.completion_tokens == sum(
        len(unpack_ids(call.sampled_ids)) for call in served.segments[0].calls
    )


async def test_one_of_several_that_fails_ends_them_all(served: World, session: GatewaySession) -> None:
    served.pool.gate = gate = asyncio.Event()

    def broken(request: GenerateRequest) -> Generation:
        raise BackendUnavailable("nothing answers")

    async with talking("chat", session) as talk:
        asking = asyncio.create_task(
            talk.client.chat.completions.create(model="m", messages=talk.messages, n=3)
        )
        await eventually(lambda: len(served.pool.requests) == 3)
        served.pool.script = broken
        gate.set()
        with pytest.raises(talk.unavailable):
            await asking
    await eventually(lambda: not served.service.stats()["in_flight"])


# -- going on from an answer


async def test_a_response_goes_on_from_another(served: World, session: GatewaySession) -> None:
    served.pool.script = served.says(f"{THOUGHT}one", "two", "three")
    async with talking("responses", session) as talk:
        await talk.say()
        create = talk.client.responses.create
        first = talk.last.id
        second = await create(model="m", input="and?", previous_response_id=first, tools=[])
        third = await create(model="m", input="else?", previous_response_id=second.id, tools=[])
        other = await create(model="m", input="else?", previous_response_id=first, tools=[])
        assert [r.output_text for r in (second, third, other)] == ["two", "three", "three"]
        with pytest.raises(talk.refused) as caught:
            await create(model="m", input="x", previous_response_id="resp_mc_none")
    assert caught.value.param == "previous_response_id"
    calls = served.segments[0].calls
    assert [call.broke.cause if call.broke else None for call in calls] == [
        None,
        "tools_changed",
        None,
        "tools_changed",
    ]
    assert calls[2].parent == calls[1].id


# -- a schema


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_needs_a_backend_that_keeps_to_it(
    served: World, session: GatewaySession, stream: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with talking("chat", session) as talk:
        with pytest.raises(talk.refused) as caught:
            await talk.say(stream=stream, response_format=format)
        assert caught.value.param == "response_format"
        served.pool.info = served.pool.info.model_copy(update={"structured": True})
        served.view()
        served.pool.script = served.says('{"a": 1}')
        assert (await talk.say(stream=stream, response_format=format)).text == '{"a": 1}'
    assert served.pool.requests[0].sampling.json_schema == schema
    assert served.segments[0].calls[0].constrained
