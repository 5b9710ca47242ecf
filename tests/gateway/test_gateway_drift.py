"""Where tokens differ from what the tree holds, through a whole gateway."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollserve.errors import InexactTokens
from rollserve.records.call import ChatRequest, Drift, Message, unpack_ids

from .conftest import SHELL, World

USER = Message(role="user", content="hi")
SPACED = '<tool_call>\n{"name": "shell", "arguments": {"command":   "ls -la"}}\n</tool_call>'


def drifts(world: World) -> list[tuple[Drift, ...]]:
    return [call.drift for call in world.segments[0].calls]


def context(world: World, index: int) -> list[int]:
    """Up to and with the sampled ids of a call; ``index`` of a path without forks."""
    ids: list[int] = []
    for call in world.segments[0].calls[: index + 1]:
        ids += [*unpack_ids(call.prompt_ids), *unpack_ids(call.sampled_ids)]
    return ids


def compact(message: Message) -> Message:
    (call,) = message.tool_calls
    squeezed = msgspec.json.encode(msgspec.json.decode(call.arguments)).decode()
    return msgspec.structs.replace(
        message, tool_calls=(msgspec.structs.replace(call, arguments=squeezed),), reasoning=None
    )


def result(message: Message) -> Message:
    return Message(role="tool", content="a", tool_call_id=message.tool_calls[0].id)


async def test_what_is_absorbed_is_told_once_with_place_and_ids(world: World) -> None:
    world.pool.script = world.says(f"<think>\nhm hm\n</think>\n\nlook\n{SPACED}", "done")
    session = await world.open()
    first = await session.model.chat([USER], tools=[SHELL])
    history = [USER, compact(first.message), result(first.message)]
    second = await session.model.chat(history, tools=[SHELL])
    await session.model.chat([*history, second.message, USER], tools=[SHELL])
    one, two, three = drifts(world)
    assert (one, three) == ((), ())
    assert [each.cause for each in two] == ["reasoning_dropped", "arguments_reserialized"]
    for each in two:
        assert each.absorbed
        assert (each.at_message, each.from_call, each.untrainable) == (1, first.call_id, 0)
        assert each.at_token is not None
        ids = context(world, 0)
        assert tuple(ids[each.at_token : each.at_token + len(each.expected)]) == each.expected
    assert two[0].expected_text == "hm hm"
    assert two[1].expected_text.startswith("  ")
    assert two[1].found_text.startswith('"ls -la"')
    assert world.tokenizer.decode(list(two[1].found)).startswith('"ls')
    # the sampled ids stand
    calls = world.segments[0].calls
    assert [call.parent for call in calls] == [None, calls[0].id, calls[1].id]
    assert session.counts["rewritten"] == 2
    assert session.counts["breaks"] == 0


async def test_faithful_renders_what_came_back(world: World) -> None:
    world.pool.script = world.says(f"look\n{SPACED}", "done")
    session = await world.open(run={"rewrites": "faithful"})
    first = await session.model.chat([USER], tools=[SHELL])
    history = [USER, compact(first.message), result(first.message)]
    second = await session.model.chat(history, tools=[SHELL])
    await session.model.chat([*history, second.message, USER], tools=[SHELL])
    one, two, three = world.segments[0].calls
    assert (two.parent, three.parent) == (None, two.id)
    assert two.broke is not None
    assert (two.broke.cause, two.broke.from_call) == ("arguments_reserialized", one.id)
    assert '"command":   "ls' not in world.tokenizer.decode(world.pool.requests[1].token_ids)
    (drift,) = two.drift
    assert (drift.cause, drift.absorbed) == ("arguments_reserialized", False)
    assert drift.at_token is not None
    whole = context(world, 0)
    assert whole[: drift.at_token] == world.pool.requests[1].token_ids[: drift.at_token]
    assert tuple(whole[drift.at_token :][: len(drift.expected)]) == drift.expected
    assert tuple(world.pool.requests[1].token_ids[drift.at_token :][:16]) == drift.found


@pytest.mark.parametrize("change", ["respelled", "edited"])
async def test_fail_refuses_a_rewrite(world: World, change: str) -> None:
    world.pool.script = world.says(f"look\n{SPACED}")
    session = await world.open(run={"rewrites": "fail"})
    first = await session.model.chat([USER], tools=[SHELL])
    back = compact(first.message)
    if change == "edited":
        back = msgspec.structs.replace(back, content="other")
    with pytest.raises(InexactTokens, match="message 1"):
        await session.model.chat([USER, back, result(first.message)], tools=[SHELL])
    assert session.counts["rewritten"] == 1
    assert len(world.segments[0].calls) == 1
    await session.model.chat([USER, first.message, result(first.message)], tools=[SHELL])
    assert world.segments[0].calls[1].drift == ()


async def test_a_break_says_where_the_tokens_differ(world: World) -> None:
    session = await world.open()
    system = Message(role="system", content="s")
    first = await session.model.chat([system, USER])
    other = Message(role="user", content="ho")
    await session.model.chat([system, other, first.message, USER])
    (drift,) = drifts(world)[1]
    assert (drift.cause, drift.at_message, drift.from_call) == ("history_edited", 1, first.call_id)
    assert drift.at_token is not None
    assert context(world, 0)[drift.at_token] != world.pool.requests[1].token_ids[drift.at_token]
    assert drift.expected_text.startswith("i<|im_end|>")
    assert drift.found_text.startswith("o<|im_end|>")


async def test_stripped_thinking_and_templates_have_their_causes(world: World) -> None:
    world.pool.script = world.says("<think>\nhm\n</think>\n\nok")
    session = await world.open(run={"thinking": "strip"})
    first = await session.model.chat([USER])
    await session.model.chat([USER, first.message, USER])
    assert [each.cause for each in drifts(world)[1]] == ["thinking_stripped"]
    assert "<think>" in drifts(world)[1][0].expected_text


async def test_ids_that_the_backend_did_not_consume(world: World) -> None:
    session = await world.open()
    world.pool.script = lambda request: world.generation("ok", prompt_ids=[7, *request.token_ids])
    await session.model.chat([USER])
    (drift,) = drifts(world)[0]
    assert (drift.cause, drift.at_token, drift.untrainable) == ("backend_ids", 0, len(world.ids("ok")))
    assert drift.found[0] == 7
    assert drift.found[1:] == drift.expected[:15]


@pytest.mark.parametrize(
    ("changes", "cause"), [({"logprobs": []}, "logprobs"), ({"logprobs": [float("nan")]}, "logprobs")]
)
async def test_other_reasons_have_no_ids(world: World, changes: dict[str, Any], cause: str) -> None:
    session = await world.open()
    world.pool.script = lambda request: world.generation("ok", **changes)
    await session.model.chat([USER])
    (drift,) = drifts(world)[0]
    assert (drift.cause, drift.expected, drift.found) == (cause, (), ())
    assert drift.untrainable == len(world.ids("ok"))


async def test_a_call_in_a_cleaned_session_has_label_and_origin(world: World) -> None:
    session = await world.open()
    first = await session.model.chat([USER], tools=[SHELL])
    await session.model.chat([USER, first.message, USER])
    one, two = world.segments[0].calls
    assert (one.label, one.origin) == ("continuation", None)
    assert (two.label, two.origin, two.parent) == ("continuation", one.id, None)


async def test_an_agent_that_puts_the_stop_text_back(world: World) -> None:
    """It was sampled, and cut off what the agent was given."""
    world.pool.script = world.says("look here</code> and more", "done")
    session = await world.open()
    first = (await session.call(ChatRequest(messages=(USER,), stop=("</code>",)))).reply
    assert first.message.content == "look here"
    back = msgspec.structs.replace(first.message, content="look here</code>")
    await session.model.chat([USER, back, USER])
    one, two = world.segments[0].calls
    assert two.parent == one.id
    assert [(each.cause, each.absorbed) for each in two.drift] == [("stop_text_kept", True)]
    assert two.drift[0].found_text == "</code>"
    other = msgspec.structs.replace(first.message, content="look here</codes>")
    await session.model.chat([USER, other, USER])
    assert world.segments[0].calls[2].broke is not None


SIDE = {"small": {"policy": "side", "side_calls": True}}


async def test_side_calls_go_to_the_route_for_them(world: World) -> None:
    """Also what goes on from them; the main line never stands on what another policy said."""
    world.view_of("side", model="small")
    session = await world.open(run={"routes": SIDE})
    first = await session.model.chat([USER], tools=[SHELL])
    system = Message(role="system", content="Write a title.")
    title = await session.model.chat([system, USER])
    await session.model.chat([system, USER, title.message, USER])
    await session.model.chat([USER, first.message, USER], tools=[SHELL])
    calls = world.segments[0].calls
    assert [call.policy for call in calls] == ["", "side", "side", ""]
    assert [call.route for call in calls] == ["", "small", "small", ""]
    assert [call.label for call in calls] == ["continuation", "side", "side", "continuation"]
    assert [request.model for request in world.pool.requests] == ["tiny", "small", "small", "tiny"]
    assert [call.parent for call in calls] == [None, None, calls[1].id, calls[0].id]
    await session.close()
    assert world.pool.released == [session.id, session.id]


async def test_a_side_call_on_the_main_lines_history_is_rendered_whole(world: World) -> None:
    world.view_of("side", model="small")
    session = await world.open(run={"routes": SIDE})
    first = await session.model.chat([USER], tools=[SHELL])
    asked = ChatRequest(messages=(USER, first.message, USER), tools=(SHELL,), hints={"purpose": "title"})
    await session.call(asked)
    _, two = world.segments[0].calls
    assert (two.policy, two.parent, two.broke) == ("side", None, None)
    assert two.messages == (USER, first.message, USER)
