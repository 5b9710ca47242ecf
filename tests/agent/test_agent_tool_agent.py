"""The built-in agent, turn by turn, against a scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rollserve.agent.base import AgentResult, Toolbox
from rollserve.agent.tool_agent import GO_ON, ToolAgent, ToolAgentOptions, cut
from rollserve.agent.toolbox import BuiltToolbox
from rollserve.errors import BackendError, BackendUnavailable, ContextTooLong, LimitReached, SandboxError
from rollserve.records.call import Message, ToolCall
from rollserve.sandbox.base import ExecResult
from rollserve.sandbox.tools.plain import EchoTool, ShellTool, SubmitTool
from rollserve.testing.fakes import FakeSandbox, ScriptedModel, Turn, says, some_episode


def toolbox(sandbox: FakeSandbox | None = None) -> Toolbox:
    box = sandbox or FakeSandbox(lambda command: ExecResult(output=f"ran {command}\n", exit_code=0))
    return BuiltToolbox({"shell": ShellTool(box, 5), "submit": SubmitTool(), "echo": EchoTool()}, {})


async def run(
    *turns: Turn, sandbox: FakeSandbox | None = None, **options: Any
) -> tuple[AgentResult, ScriptedModel]:
    model = ScriptedModel(*turns)
    agent = ToolAgent(ToolAgentOptions(**options))
    return await agent.run(some_episode(model, toolbox(sandbox))), model


async def test_a_turn_without_a_tool_call_is_the_answer() -> None:
    result, model = await run(says("  42\n"), system="be brief")
    assert result == AgentResult(answer="42")
    assert model.asked[0] == (
        Message(role="system", content="be brief"),
        Message(role="user", content="do it"),
    )
    assert [tool["function"]["name"] for tool in model.offered[0]] == ["shell", "submit", "echo"]


async def test_reasoning_is_no_part_of_the_answer() -> None:
    reply = says()
    thought = msgspec.structs.replace(
        reply, message=Message(role="assistant", content="7", reasoning="is it 8?")
    )
    result, _ = await run(thought)
    assert result.answer == "7"


async def test_tools_run_in_order_and_the_conversation_grows() -> None:
    first = says("look", ("shell", '{"command": "ls"}'), ("echo", '{"text": "hi"}'))
    result, model = await run(first, says("", ("submit", '{"answer": "42"}')))
    assert result == AgentResult(answer="42")
    assert model.asked[1] == (
        Message(role="user", content="do it"),
        first.message,
        Message(role="tool", content="ran ls", tool_call_id="call_0", name="shell"),
        Message(role="tool", content="hi", tool_call_id="call_1", name="echo"),
    )


async def test_nothing_runs_after_submit() -> None:
    sandbox = FakeSandbox()
    turn = says("", ("submit", '{"answer": "1"}'), ("shell", '{"command": "rm -rf /"}'))
    result, _ = await run(turn, sandbox=sandbox)
    assert result.answer == "1"
    assert sandbox.commands == []


async def test_what_the_model_does_wrong_comes_back_to_it() -> None:
    parsed = ToolCall(id="t", name="shell", arguments="{", error="unclosed bracket")
    broken = msgspec.structs.replace(
        says(), message=Message(role="assistant", tool_calls=(parsed,)), finish_reason="tool_calls"
    )
    wrong = says("", ("shel", "{}"), ("shell", "{broken"), ("shell", '{"cmd": "ls"}'), ("shell", "[1]"))
    result, model = await run(broken, wrong, says("sorry"))
    assert result.answer == "sorry"
    assert model.asked[1][-1].content == "error: unclosed bracket"
    unknown, no_json, no_command, no_object = (message.content for message in model.asked[2][-4:])
    assert "did you mean 'shell'" in unknown
    assert "not valid JSON" in no_json
    assert "`command` is required (string)" in no_command
    assert "must be a JSON object" in no_object


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (LimitReached("max_turns", "64 turns"), "max_turns"),
        (LimitReached("max_sampled_tokens", "131072 tokens"), "max_sampled_tokens"),
        (ContextTooLong("too long"), "context_tokens"),
    ],
)
async def test_a_limit_ends_it_with_what_there_is(error: Exception, limit: str) -> None:
    result, _ = await run(says("I think 42", ("echo", '{"text": "x"}')), error)
    assert result == AgentResult(answer="I think 42", truncated_by=limit)
    assert (await run(error))[0] == AgentResult(answer=None, truncated_by=limit)


async def test_an_answer_cut_at_max_tokens_is_marked() -> None:
    result, _ = await run(says("and then", finish_reason="length"))
    assert result == AgentResult(answer="and then", truncated_by="max_tokens")
    result, _ = await run(says("first", ("echo", "{}")), says("", finish_reason="length"))
    assert result == AgentResult(answer="first", truncated_by="max_tokens")


async def test_an_aborted_generation_is_no_answer() -> None:
    with pytest.raises(BackendError):
        await run(says("par", finish_reason="abort"))


async def test_infrastructure_is_not_hidden() -> None:
    with pytest.raises(BackendUnavailable):
        await run(BackendUnavailable("nothing answers"))
    gone = FakeSandbox()
    await gone.close()
    with pytest.raises(SandboxError):
        await run(says("", ("shell", '{"command": "ls"}')), sandbox=gone)


async def test_text_can_be_no_answer() -> None:
    turns = (says("hm"), says("", ("submit", '{"answer": "42"}')))
    result, model = await run(*turns, stop_on_text=False)
    assert result.answer == "42"
    assert model.asked[1][-1] == Message(role="user", content=GO_ON)


async def test_long_output_loses_its_middle() -> None:
    sandbox = FakeSandbox(lambda command: ExecResult(output="a" * 5000 + "b" * 5000, exit_code=0))
    turn = says("", ("shell", '{"command": "cat big"}'))
    _, model = await run(turn, says("ok"), sandbox=sandbox, max_tool_output_chars=100)
    text = model.asked[1][-1].content
    assert len(text) < 160
    assert text.startswith("a" * 50)
    assert text.endswith("b" * 50)
    assert "9900 characters left out" in text
    assert cut("short", 100) == "short"


async def test_a_cancel_reaches_the_call_in_progress() -> None:
    model = ScriptedModel()
    task = asyncio.create_task(ToolAgent(ToolAgentOptions()).run(some_episode(model, toolbox())))
    await model.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert model.cancelled == 1
