"""Engines that render: what is sent to them, what is read, and what is refused when they register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rollserve.backend.base import Backend, Chat, Delta, GenerateRequest
from rollserve.errors import BackendError, InvalidInput
from rollserve.gateway.tokens import load_tokenizer
from rollserve.records.call import Message, SamplingParams, ToolCall
from rollserve.records.policy import BackendKind, BackendSpec
from rollserve.testing.asgi import Receive, Scope, Send, answer
from rollserve.testing.scripted import Reply, ScriptedEngine, replies
from rollserve.testing.scripted_chat import ChatApp, Form
from rollserve.testing.scripted_server import serving

Connect = Callable[..., Backend]
TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
TOKENS: tuple[Form, ...] = ("vllm", "sglang", "llama.cpp")


def says(text: str, **options: Any) -> ScriptedEngine:
    ids = tuple(load_tokenizer("tiny").encode(f"{text}<|im_end|>"))
    return ScriptedEngine(replies(Reply(token_ids=ids)), label=None, **options)


def request(*messages: Message, tools: bool = False, **sampling: Any) -> GenerateRequest:
    given = messages or (Message(role="user", content="hi"),)
    return GenerateRequest(
        request_id="r1",
        model="scripted",
        token_ids=[],
        sampling=SamplingParams(**{"max_tokens": 64, **sampling}),
        chat=Chat(messages=given, tools=(TOOL,) if tools else ()),
    )


@pytest.mark.parametrize("form", TOKENS)
@pytest.mark.parametrize("streams", [False, True])
async def test_ids_and_what_the_engine_read(form: Form, streams: bool, connect: Connect) -> None:
    engine = says(f"<think>\nwhy\n</think>\n\nlook\n{CALL}", chunk_tokens=1)
    app = ChatApp(engine, form)
    async with serving(app) as url:
        made = await connect(url, BackendKind.CHAT).generate(
            request(tools=True), (lambda ids, logprobs: None) if streams else None
        )
    assert made.reply is not None
    assert (made.reply.reasoning, made.reply.content) == ("why", "look")
    (call,) = made.reply.tool_calls
    assert (call.id, call.name, call.arguments) == ("chatcmpl-tool-0", "shell", '{"command": "ls"}')
    assert made.finish_reason == "stop"
    assert made.prompt_ids == engine.seen[-1].token_ids
    assert made.token_ids == list(engine.script([]).token_ids)
    assert len(made.logprobs) == len(made.token_ids)


async def test_a_service_of_text_gets_nothing_that_is_not_openais(connect: Connect) -> None:
    app = ChatApp(says("fine"), "text")
    past = Message(role="assistant", content="x", reasoning="y")
    async with serving(app) as url:
        backend = connect(url, BackendKind.TEXT)
        made = await backend.generate(request(past, Message(role="user", content="go on")))
        with pytest.raises(BackendError, match="top_k"):
            await backend.generate(request(top_k=5))
    assert made.reply == Message(role="assistant", content="fine")
    assert (made.token_ids, made.prompt_ids) == ([], None)


async def test_what_is_sent_of_a_conversation(connect: Connect) -> None:
    app = ChatApp(says("ok"))
    call = ToolCall(id="native-1", name="shell", arguments="{}")
    messages = (
        Message(role="user", content="u"),
        Message(role="assistant", content="a", reasoning="r", tool_calls=(call,)),
        Message(role="tool", content="t", tool_call_id="native-1"),
    )
    schema = {"type": "object"}
    async with serving(app) as url:
        await connect(url, BackendKind.CHAT).generate(request(*messages, tools=True, json_schema=schema))
    (asked,) = app.asked
    assert tuple(message.ours() for message in asked.messages) == messages
    assert asked.tools == (TOOL,)
    assert asked.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema},
    }


@pytest.mark.parametrize("form", TOKENS)
async def test_a_probe_of_an_engine_that_gives_ids(form: Form, connect: Connect) -> None:
    async with serving(ChatApp(says("fine, thanks"), form)) as url:
        info = await connect(url, BackendKind.CHAT).probe()
    assert info.models == ["scripted"]
    assert (info.logprobs_mode, info.reports_versions) == ("processed", False)
    assert len(info.warnings) == 1
    assert "weight versions" in info.warnings[0]


async def test_a_probe_warns_of_text_alone(connect: Connect) -> None:
    async with serving(ChatApp(says("fine"), "text")) as url:
        info = await connect(url, BackendKind.TEXT).probe()
    assert "no token ids" in info.warnings[0]
    assert info.logprobs_mode == "unknown"


async def test_a_probe_refuses_text_where_ids_are_wanted(connect: Connect) -> None:
    async with serving(ChatApp(says("fine"), "text")) as url:
        with pytest.raises(InvalidInput) as refused:
            await connect(url, BackendKind.CHAT).probe()
    assert refused.value.field == "url"
    assert "text" in (refused.value.hint or "")


async def test_a_probe_refuses_an_engine_that_hides_the_prompt(connect: Connect) -> None:
    app = ChatApp(says("fine"), "llama.cpp")

    async def gone(scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        await answer(send, 404, {"error": "no"})

    app.add_route("/apply-template", gone)
    async with serving(app) as url:
        with pytest.raises(InvalidInput, match="which prompt ids it consumed"):
            await connect(url, BackendKind.CHAT).probe()


async def test_a_probe_warns_where_tools_are_not_taken(connect: Connect) -> None:
    app = ChatApp(says("fine"))
    app.takes_tools = False
    async with serving(app) as url:
        info = await connect(url, BackendKind.CHAT).probe()
    assert any("does not take tools" in warning for warning in info.warnings)


async def test_a_template_that_is_not_the_one_used_is_found_out(connect: Connect) -> None:
    app = ChatApp(says("fine"), "llama.cpp")

    async def other(scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        await answer(send, 200, {"tokens": [1, 2, 3]})

    app.add_route("/tokenize", other)
    async with serving(app) as url:
        with pytest.raises(BackendError, match="makes 3 tokens"):
            await connect(url, BackendKind.CHAT).generate(request())


async def test_no_route_is_told_at_registration(url: str, connect: Connect) -> None:
    with pytest.raises(InvalidInput, match="no such route"):
        await connect(url, BackendKind.CHAT).probe()


async def test_ids_can_not_be_sent(connect: Connect) -> None:
    async with serving(ChatApp(says("fine"))) as url:
        with pytest.raises(BackendError, match="takes messages"):
            await connect(url, BackendKind.CHAT).generate(replace(request(), chat=None, token_ids=[1]))


async def test_text_is_heard_before_the_end(connect: Connect) -> None:
    heard: list[Delta] = []
    engine = says("one two three four", chunk_tokens=1)
    marks: list[int] = []
    async with serving(ChatApp(engine, "text")) as url:
        asked = request()
        assert asked.chat is not None
        asked = replace(asked, chat=replace(asked.chat, hear=heard.extend))
        await connect(url, BackendKind.TEXT).generate(asked, lambda ids, logprobs: marks.append(len(heard)))
    assert "".join(delta.text for delta in heard) == "one two three four"
    assert marks[0] == 0
    assert len(marks) > 2


def test_kinds_by_interface() -> None:
    spoken = {kind: BackendSpec(url="http://x", kind=kind).kind.interface for kind in BackendKind}
    assert spoken.pop(BackendKind.CHAT) == "chat"
    assert spoken.pop(BackendKind.TEXT) == "text"
    assert set(spoken.values()) == {"tokens"}
