"""Engines that render: ids prove what extends what; and services that give text alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from tests.gateway.conftest import SHELL, MemorySegment, PauseCounter, World
from tests.gateway.serving import of_session
from tests.gateway.serving import serving as http_serving

from rollserve.backend.base import GenerateRequest, Generation
from rollserve.backend.pool import BackendPool
from rollserve.backend.registry import make_backend
from rollserve.dialect.base import Piece
from rollserve.errors import BackendUnavailable, InvalidInput, LimitReached
from rollserve.executor.base import PolicyView
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.proof import check_sample
from rollserve.gateway.recording import Answer
from rollserve.gateway.samples import build_samples, left_out, token_report
from rollserve.gateway.service import GatewayService
from rollserve.gateway.sessions import GatewaySession
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.call import Call, ChatRequest, Message, unpack_ids
from rollserve.records.policy import (
    Backend,
    BackendInfo,
    BackendKind,
    BackendSpec,
    Modality,
    Policy,
    PolicySpec,
)
from rollserve.records.rollout import Rollout
from rollserve.records.run import RunSpec
from rollserve.records.sample import Sample
from rollserve.records.task import Limits
from rollserve.testing.scripted import Reply, ScriptedEngine, replies
from rollserve.testing.scripted_chat import ChatApp
from rollserve.testing.scripted_images import IMAGE_TOKEN
from rollserve.testing.scripted_server import serving
from rollserve.wire import Form, from_wire, to_wire

USER = Message(role="user", content="hi")
MORE = Message(role="user", content="and now?")
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'


class Heard:
    """A ``Listener``."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.taken = 0

    def admitted(self) -> None:
        self.taken += 1

    def let_out(self, piece: Piece) -> None:
        self.pieces.append(piece)

    def text(self, kind: str) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)


class Room:
    """A gateway whose policy ``p`` is served by a fake engine that renders, over a real socket."""

    def __init__(self, app: ChatApp, url: str, tokenizer: TextTokenizer, **settings: Any) -> None:
        self.app = app
        self.tokenizer = tokenizer
        kind = BackendKind.TEXT if app.form == "text" else BackendKind.CHAT
        spec = PolicySpec(
            name="p",
            model="scripted",
            interface=kind.interface,
            tokenizer=None if kind is BackendKind.TEXT else "tiny",
        )
        info = BackendInfo(
            engine="scripted",
            models=["scripted"],
            logprobs_mode="processed",
            image_token=tokenizer.token_id(IMAGE_TOKEN),
        )
        accepts: list[Modality] = ["text", "image"] if app.takes_images else ["text"]
        server = BackendSpec(url=url, kind=kind, accepts=accepts)
        backend = Backend(id="b1", policy="p", spec=server, info=info)
        self.service = GatewayService(
            lambda policy: BackendPool(model=policy.spec.model, make=make_backend), **settings
        )
        self.service.update_policy(
            PolicyView(
                revision=1,
                policy_json=Policy(spec=spec).model_dump_json().encode(),
                backends_json=[backend.model_dump_json().encode()],
            )
        )
        self.segment = MemorySegment()

    @property
    def calls(self) -> list[Call]:
        return self.segment.calls

    async def open(self, **changes: Any) -> GatewaySession:
        spec = SessionSpec(
            attempt_id="a1",
            rollout_id="r1",
            run=RunSpec(policy="p", **changes.get("run", {})),
            limits=Limits(**changes.get("limits", {})),
            segment=self.segment,
            clock=PauseCounter(),
        )
        return await self.service.open_session(spec)

    def says(self, *texts: str) -> None:
        each = [Reply(token_ids=tuple(self.tokenizer.encode(f"{text}<|im_end|>"))) for text in texts]
        self.app.engine.script = replies(*each)

    def samples(self, run: RunSpec | None = None, reward: float | None = 1.0) -> list[Sample]:
        rollout = Rollout(id="r", group_id="g", run_id="run", index=0, reward=reward)
        return build_samples(self.calls, rollout=rollout, run=run or RunSpec(policy="p"))


@pytest.fixture
async def enter(tiny: TextTokenizer) -> AsyncIterator[Callable[..., Any]]:
    """``await enter(form)``: a room."""
    async with AsyncExitStack() as stack:

        async def make(form: Any = "vllm", **options: Any) -> Room:
            app = ChatApp(ScriptedEngine(label=None, **options), form)
            room = Room(app, await stack.enter_async_context(serving(app)), tiny)
            stack.push_async_callback(room.service.close)
            return room

        yield make


async def ask(session: GatewaySession, *messages: Message, **changes: Any) -> Answer:
    listener = changes.pop("listener", None)
    return await session.call(ChatRequest(messages=messages, **changes), listener)


@pytest.mark.parametrize("form", ["vllm", "sglang", "llama.cpp"])
async def test_a_conversation_is_extended_where_the_ids_prove_it(form: str, enter: Any) -> None:
    room = await enter(form)
    room.says(f"look\n{CALL}", "done")
    session = await room.open()
    first = await session.model.chat([USER], tools=[SHELL])
    assert (first.finish_reason, first.message.content) == ("tool_calls", "look")
    (tool_call,) = first.message.tool_calls
    assert tool_call.id.endswith("|chatcmpl-tool-0")
    out = Message(role="tool", content="a b", tool_call_id=tool_call.id)
    second = await session.model.chat([USER, first.message, out], tools=[SHELL])
    assert second.message.content == "done"
    one, two = room.calls
    assert (two.parent, two.messages, two.broke, two.inexact) == (one.id, (out,), None, None)
    prompts = [request.token_ids for request in room.app.engine.seen]
    context = [*unpack_ids(one.prompt_ids), *unpack_ids(one.sampled_ids)]
    assert unpack_ids(one.prompt_ids).tolist() == prompts[0]
    assert [*context, *unpack_ids(two.prompt_ids)] == prompts[1]
    assert second.prompt_tokens == len(prompts[1])
    sent = room.app.asked[1].messages
    assert [message.tool_call_id for message in sent] == [None, None, "chatcmpl-tool-0"]
    (sample,) = room.samples()
    assert sample.exact
    assert sample.ids.tolist() == [*prompts[1], *unpack_ids(two.sampled_ids)]
    assert int(sample.loss_mask.sum()) == first.sampled_tokens + second.sampled_tokens
    assert check_sample(sample, {call.id: call for call in room.calls}, room.tokenizer, 0).findings == []


async def test_a_template_that_drops_thinking_breaks_the_line(enter: Any) -> None:
    room = await enter()
    room.says("<think>\nwhy\n</think>\n\nfirst", "second")
    session = await room.open()
    first = await session.model.chat([USER])
    assert (first.message.reasoning, first.message.content) == ("why", "first")
    await session.model.chat([USER, first.message, MORE])
    one, two = room.calls
    assert two.parent is None
    assert two.broke is not None
    assert (two.broke.cause, two.broke.from_call, two.origin) == ("template", one.id, one.id)
    assert unpack_ids(two.prompt_ids).tolist() == room.app.engine.seen[1].token_ids
    (drift,) = two.drift
    assert "think" in drift.expected_text
    assert session.counts["breaks"] == 1
    samples = room.samples()
    assert [sample.exact for sample in samples] == [True, True]
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert trained == sum(len(call.sampled_ids) // 4 for call in room.calls)


async def test_the_models_own_turns_are_sent_as_it_gave_them(enter: Any) -> None:
    """The harness trimmed and respelled; what the model consumes next is what it said."""
    room = await enter()
    room.says(f"look\n{CALL}", "done")
    session = await room.open()
    first = await session.model.chat([USER], tools=[SHELL])
    (tool_call,) = first.message.tool_calls
    back = json.loads(json.dumps({"command": "ls"}, indent=1))
    rewritten = Message(
        role="assistant",
        content="look ",
        tool_calls=(
            type(tool_call)(id=tool_call.id, name="shell", arguments=json.dumps(back, separators=(",", ":"))),
        ),
    )
    out = Message(role="tool", content="a b", tool_call_id=tool_call.id)
    await session.model.chat([USER, rewritten, out], tools=[SHELL])
    assert room.calls[1].parent == room.calls[0].id
    assert room.calls[1].drift[0].absorbed


async def test_broken_arguments_go_back_as_an_object(enter: Any) -> None:
    room = await enter()
    room.says('<tool_call>\n{"name": "shell", "arguments": [1]}\n</tool_call>', "done")
    session = await room.open()
    first = await session.model.chat([USER], tools=[SHELL])
    (tool_call,) = first.message.tool_calls
    assert tool_call.error is not None
    out = Message(role="tool", content="no", tool_call_id=tool_call.id)
    second = await session.model.chat([USER, first.message, out], tools=[SHELL])
    assert second.message.content == "done"
    (sent,) = room.app.asked[1].messages[1].tool_calls
    assert isinstance(json.loads(sent.function.arguments), dict)


@pytest.mark.parametrize("form", ["vllm", "text"])
async def test_text_streams_and_a_stop_ends_it(form: str, enter: Any) -> None:
    room = await enter(form, chunk_tokens=1)
    room.says("one two END three four")
    session = await room.open()
    heard = Heard()
    answer = await ask(session, USER, stop=("END",), listener=heard)
    assert answer.reply.message.content == heard.text("content") == "one two"
    assert (answer.stopped_by, answer.reply.finish_reason) == ("END", "stop")
    assert heard.taken >= 1
    assert len(heard.pieces) > 1
    kept = unpack_ids(room.calls[0].sampled_ids).tolist()
    whole = room.tokenizer.encode("one two END three four<|im_end|>")
    assert kept == whole[: len(kept)]
    assert len(kept) < len(whole)


@pytest.mark.parametrize("form", ["vllm", "text"])
async def test_what_is_let_out_is_the_beginning_of_the_answer(form: str, enter: Any) -> None:
    room = await enter(form, chunk_tokens=1)
    room.says("<think>\nhm, why\n</think>\n\nlook here")
    session = await room.open()
    heard = Heard()
    message = (await ask(session, USER, listener=heard)).reply.message
    assert (heard.text("reasoning"), heard.text("content")) == ("hm, why", "look here")
    assert (message.reasoning, message.content) == ("hm, why", "look here")


async def test_tokens_can_not_be_counted_before(enter: Any) -> None:
    room = await enter()
    session = await room.open()
    with pytest.raises(InvalidInput, match="engine renders"):
        await session.conversation_state.count(ChatRequest(messages=(USER,)))


async def test_text_alone_is_recorded_and_never_trained(enter: Any) -> None:
    room = await enter("text")
    room.says(f"look\n{CALL}", "done")
    session = await room.open()
    first = await session.model.chat([USER], tools=[SHELL])
    assert (first.prompt_tokens, first.sampled_tokens) == (
        len(room.app.engine.seen[0].token_ids),
        len(room.tokenizer.encode(f"look\n{CALL}<|im_end|>")),
    )
    out = Message(role="tool", content="a b", tool_call_id=first.message.tool_calls[0].id)
    await session.model.chat([USER, first.message, out], tools=[SHELL])
    one, two = room.calls
    assert (two.parent, two.messages, two.reply.content) == (one.id, (out,), "done")
    assert {call.inexact for call in room.calls} == {"no_tokens"}
    assert {len(call.prompt_ids) + len(call.sampled_ids) for call in room.calls} == {0}
    assert session.counts["inexact"] == 2
    assert session.counts["sampled_tokens"] == 0
    run = RunSpec(policy="p")
    assert room.samples() == []
    assert left_out(room.calls, run) == {one.id: "no_tokens", two.id: "no_tokens"}
    assert token_report(room.calls, [], run).sampled == 0


@pytest.mark.parametrize("reward", [1.0, None])
async def test_a_run_that_keeps_text_gets_it(reward: float | None, enter: Any) -> None:
    room = await enter("text")
    room.says("fine", "better")
    session = await room.open()
    first = await session.model.chat([USER])
    await session.model.chat([USER, first.message, MORE])
    (sample,) = room.samples(RunSpec(policy="p", on_inexact="text"), reward)
    assert (sample.exact, sample.cause, sample.reward) == (False, "no_tokens", reward)
    assert sample.text == "[user]\nhi\n\n[assistant]\nfine\n\n[user]\nand now?\n\n[assistant]\nbetter"
    arrays = (sample.ids, sample.loss_mask, sample.logprobs, sample.versions, sample.rewards)
    assert [(len(array), array.dtype) for array in arrays] == [
        (0, np.dtype(name)) for name in ("int32", "bool", "float32", "int32", "float32")
    ]
    assert check_sample(sample, {call.id: call for call in room.calls}, None, 0).findings == []
    forms: tuple[Form, ...] = ("json", "msgpack")
    for form in forms:
        arrived = from_wire(to_wire(sample, form))
        assert (arrived.text, arrived.cause, len(arrived.ids)) == (sample.text, "no_tokens", 0)


async def test_tokens_that_are_only_counted_use_the_budget(enter: Any) -> None:
    room = await enter("text")
    room.says("one two three")
    session = await room.open(limits={"max_sampled_tokens": 4})
    first = await session.model.chat([USER])
    assert first.finish_reason == "length"
    with pytest.raises(LimitReached):
        await session.model.chat([USER, first.message, MORE])


@pytest.mark.parametrize("form", ["vllm", "text"])
async def test_an_agent_streams_over_http(form: str, enter: Any) -> None:
    """Text, then a tool call, then what was counted; logprobs only where there are tokens."""
    room = await enter(form, chunk_tokens=1)
    room.says(f"let me look\n{CALL}")
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [SHELL],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
    }
    async with http_serving(room) as _:
        session = await room.open()
        async with of_session(session) as client:
            answer = await client.post("chat/completions", json=body)
    assert answer.status_code == 200
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "let me look"
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["shell"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    sampled = len(room.app.engine.script([]).token_ids)
    assert events[-1]["usage"]["completion_tokens"] == sampled
    logprobs = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert len(logprobs) == (sampled if form == "vllm" else 0)


class Interrupted:
    """An engine that renders, stopped in its first answer by nobody we know."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.left = 1

    def __call__(self, request: GenerateRequest) -> Generation:
        assert request.chat is not None
        text, finish = ("the whole", "stop") if not self.left else ("the ha", "abort")
        self.left = 0
        reply = Message(role="assistant", content=text)
        return self.world.generation(text, finish_reason=finish, reply=reply, prompt_ids=[1, 2, 3])


async def chatting(world: World) -> GatewaySession:
    world.spec = world.spec.model_copy(update={"interface": "chat"})
    world.view()
    world.pool.script = Interrupted(world)
    return await world.open()


async def test_an_answer_that_was_stopped_is_made_again_from_its_start(world: World) -> None:
    session = await chatting(world)
    reply = await session.model.chat([USER])
    assert reply.message.content == "the whole"
    assert [request.token_ids for request in world.pool.requests] == [[], []]
    (call,) = world.segments[0].calls
    assert unpack_ids(call.sampled_ids).tolist() == world.ids("the whole")
    assert unpack_ids(call.prompt_ids).tolist() == [1, 2, 3]


async def test_an_answer_that_was_heard_can_not_be_made_again(world: World) -> None:
    session = await chatting(world)
    with pytest.raises(BackendUnavailable, match="in the middle of an answer"):
        await ask(session, USER, listener=Heard())
