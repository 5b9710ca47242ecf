"""Stop texts: honoured in the gateway, whatever the engine."""

from __future__ import annotations

from typing import Any

import pytest

from rollserve.agent.base import Reply
from rollserve.backend.base import LabelSpan, Routed
from rollserve.dialect.base import Piece
from rollserve.gateway.recording import Answer
from rollserve.gateway.rendering import Rendering
from rollserve.gateway.stopping import ended, follow
from rollserve.gateway.streaming import AnswerText, LetOut, first_stop
from rollserve.records.call import ChatRequest, Message, unpack_floats, unpack_ids
from rollserve.records.ids import Ids

from .conftest import SHELL, World

USER = Message(role="user", content="hi")
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "Observation:"}}\n</tool_call>'


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.known = LetOut()
        self.pieces: list[Piece] = []
        self.admissions = 0

    def admitted(self) -> None:
        self.admissions += 1

    def let_out(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.known.add(piece)

    def text(self, reply: Reply) -> tuple[str, str]:
        """Reasoning and content, with what was missing at the end."""
        pieces = [*self.pieces, *self.known.rest(reply.message)]
        found = {kind: "".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content")}
        return found["reasoning"], found["content"]


async def say(world: World, text: str, *stop: str, tools: tuple[Any, ...] = ()) -> tuple[Answer, Heard]:
    world.pool.script = world.says(text)
    session = await world.open()
    heard = Heard()
    request = ChatRequest(messages=(USER,), stop=stop, tools=tools)
    return await session.call(request, heard), heard


@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("one two three", ("two",), "one"),
        ("one two three", ("three", "two"), "one"),
        ("one two three", ("o thr",), "one tw"),
        ("first\nObservation: x", ("Observation:", "Calling"), "first"),
        ("first\nObservation", ("Observation:",), "first\nObservation"),
        ("aab", ("ab",), "a"),
        ("same", ("same",), ""),
        ("\n\nafter blanks\n\nmore", ("\n\n",), "after blanks"),
        ("ünï字🙂ende", ("🙂",), "ünï字"),
        ("<think>\ntwo in a thought\n</think>\n\none two", ("two",), "one"),
    ],
)
async def test_an_answer_ends_before_the_text(
    world: World, text: str, stop: tuple[str, ...], content: str
) -> None:
    answer, heard = await say(world, text, *stop)
    stopped = any(each in text.rpartition("</think>")[2] for each in stop)
    assert answer.reply.message.content == content
    assert answer.reply.finish_reason == "stop"
    assert (answer.stopped_by is not None) == stopped
    assert heard.text(answer.reply) == (answer.reply.message.reasoning or "", content)
    assert heard.admissions == 1
    (call,) = world.segments[0].calls
    whole = world.generation(text)
    sampled = unpack_ids(call.sampled_ids).tolist()
    assert sampled == whole.token_ids[: len(sampled)]
    assert len(unpack_floats(call.logprobs)) == len(sampled) == answer.reply.sampled_tokens
    if answer.stopped_by is not None:
        said = world.tokenizer.decode(sampled).rpartition("</think>")[2].lstrip()
        before = world.tokenizer.decode(sampled[:-1]).rpartition("</think>")[2].lstrip()
        assert answer.stopped_by in said
        assert answer.stopped_by not in before, "no more than what completes it"
        assert len(world.pool.aborted) == (len(sampled) < len(whole.token_ids))


async def test_tool_calls_are_not_looked_into(world: World) -> None:
    answer, heard = await say(world, f"look\n{CALL}", "Observation:", tools=(SHELL,))
    assert answer.stopped_by is None
    assert [call.name for call in answer.reply.message.tool_calls] == ["shell"]
    assert heard.text(answer.reply) == ("", "look")


async def test_the_next_turn_goes_on_from_what_was_kept(world: World) -> None:
    world.pool.script = world.says("one two three", "four")
    session = await world.open()
    first = await session.call(ChatRequest(messages=(USER,), stop=("two",)))
    history = (USER, first.reply.message, USER)
    second = await session.call(ChatRequest(messages=history))
    assert second.reply.message.content == "four"
    one, two = world.segments[0].calls
    assert (two.parent, two.broke) == (one.id, None)
    assert one.inexact is None
    context = [*unpack_ids(one.prompt_ids), *unpack_ids(one.sampled_ids), *unpack_ids(two.prompt_ids)]
    assert world.pool.requests[1].token_ids == context
    assert second.cached_tokens == len(context) - len(unpack_ids(two.prompt_ids))


def test_labels_and_extras_go_with_the_tokens(world: World, qwen3: Rendering) -> None:
    """Of tokens that came at once, the text in the middle."""
    count = len(world.ids("one two three"))
    labels = (LabelSpan(0, 1, "3"), LabelSpan(1, count, "4"), LabelSpan(count, count, "5"))
    made = world.generation("one two three", labels=labels, extras={"experts": b"x" * count})
    routed = Routed(generation=made, backend_id="b1", info=world.pool.info)
    request = ChatRequest(messages=(USER,), stop=("two",))
    following = follow(qwen3, request, Ids(), None)
    assert following is not None
    assert following(made.token_ids, made.logprobs)
    last = ended(qwen3, request, Ids(), routed, following)
    cut = last.routed.generation
    kept = len(cut.token_ids)
    assert world.tokenizer.decode(cut.token_ids) == "one two"
    assert (len(cut.logprobs), cut.extras, cut.finish_reason) == (kept, {}, "stop")
    assert cut.labels == (LabelSpan(0, 1, "3"), LabelSpan(1, kept, "4"))


class Late(Rendering):
    """A format whose text can be told only from the complete answer."""

    def opens_with(self, prompt_tail: list[int], offered_tools: bool) -> Any:
        return "held"


def test_a_format_that_tells_its_text_late(world: World, qwen3: Rendering) -> None:
    late = Late.__new__(Late)
    late.__dict__.update(qwen3.__dict__)
    made = world.generation("<think>\ntwo\n</think>\n\none two three")
    routed = Routed(generation=made, backend_id="b1", info=world.pool.info)
    request = ChatRequest(messages=(USER,), stop=("two",))
    following = follow(late, request, Ids(), None)
    assert following is not None
    assert not following(made.token_ids, made.logprobs)
    last = ended(late, request, Ids(), routed, following)
    kept = last.routed.generation.token_ids
    assert world.tokenizer.decode(kept).endswith("one two")
    assert last.text(late.parse(kept, (), [])).message.content == "one"


# -- thinking


async def test_thinking_is_let_out_as_it_comes(world: World) -> None:
    answer, heard = await say(world, "<think>\nfirst then 🙂 second\n</think>\n\nthe end")
    thoughts = [piece.text for piece in heard.pieces if piece.kind == "reasoning"]
    assert len(thoughts) > 3
    assert "".join(thoughts) == answer.reply.message.reasoning == "first then 🙂 second"
    assert heard.text(answer.reply) == ("first then 🙂 second", "the end")


@pytest.mark.parametrize(
    "text", ["<think>\nnever closed ", f"<think>\nhm {CALL}", "<think>", "<think>\n</think>\n\nx"]
)
async def test_what_is_left_of_a_thought(world: World, text: str) -> None:
    answer, heard = await say(world, text, tools=(SHELL,))
    message = answer.reply.message
    assert heard.text(answer.reply) == (message.reasoning or "", message.content)


def test_where_a_thought_may_be_read_otherwise_it_waits_for_its_end(qwen3: Rendering) -> None:
    cautious = Rendering.__new__(Rendering)
    cautious.__dict__.update(qwen3.__dict__)
    cautious.streams_thinking = False
    said: list[Piece] = []
    text = AnswerText(cautious, [], False, (), said.append)
    text.take(qwen3.tokenizer.encode("<think>\nfirst second"))
    assert said == []
    text.take(qwen3.tokenizer.encode("\n</think>\n\nx"))
    assert said == [Piece("reasoning", "first second"), Piece("content", "x")]


def test_the_first_stop_is_the_earliest_and_then_the_longest() -> None:
    assert first_stop("a bcd", ("bc", "bcd", "d")) == (2, "bcd")
    assert first_stop("a bcd", ("x",)) is None
