"""Agents of the user's, in real code hosts, and how agents are found."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollserve.agent.base import AgentResult
from rollserve.agent.registry import AgentCatalog
from rollserve.agent.toolbox import BuiltToolbox, ToolCatalog
from rollserve.errors import (
    AgentFailure,
    BackendUnavailable,
    ContextTooLong,
    InvalidInput,
    LimitReached,
    UnknownName,
)
from rollserve.records.call import Message
from rollserve.records.image import digest_of
from rollserve.records.task import AgentSpec
from rollserve.sandbox.base import Sandbox, SandboxSpec
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.tools.plain import EchoTool
from rollserve.testing.fakes import ScriptedModel, Turn, says, some_episode, some_task
from rollserve.testing.runtime_probes import open_folder
from rollserve.usercode.hosts import ZygoteHosts

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def run(
    hosts: ZygoteHosts, name: str, *turns: Turn, log: list[str] | None = None, **options: object
) -> tuple[AgentResult, ScriptedModel]:
    spec = AgentSpec(name=f"my_agents:{name}", options=options)
    entry = await AgentCatalog(hosts).resolve(spec)
    assert entry.hosted
    assert entry.code[spec.name].startswith("sha256:")
    model = ScriptedModel(*turns)
    episode = some_episode(model, BuiltToolbox({"echo": EchoTool()}, {}), log=log)
    return await entry.make(dict(spec.options)).run(episode), model


async def test_an_agent_drives_the_model_and_the_tools(agent_hosts: ZygoteHosts) -> None:
    log: list[str] = []
    turns = (says("", ("echo", '{"text": "hi"}')), says("42"))
    result, model = await run(agent_hosts, "Solver", *turns, log=log, prefix="= ")
    assert result == AgentResult(answer="= 42")
    assert model.asked[1][-1] == Message(role="tool", content="hi", tool_call_id="call_0")
    assert model.offered[0][0]["function"]["name"] == "echo"
    assert log == ["done"]
    assert agent_hosts.live == 0


async def test_what_it_returns_is_its_result(agent_hosts: ZygoteHosts) -> None:
    assert (await run(agent_hosts, "Nothing"))[0] == AgentResult()
    turn = says("", ("echo", "{}"))
    result, _ = await run(agent_hosts, "Solver", turn, turns=1)
    assert result == AgentResult(truncated_by="turns", detail={"seen": 3})


async def test_attachments_of_a_tool_reach_it(agent_hosts: ZygoteHosts) -> None:
    entry = await AgentCatalog(agent_hosts).resolve(AgentSpec(name="my_agents:Looks"))
    async with ToolCatalog(agent_hosts).open(some_task(tools=["my_tools:picture"]), None) as tools:
        result = await entry.make({}).run(some_episode(ScriptedModel(), tools))
    assert result.answer == "image/png UE5H"


@pytest.mark.parametrize("sees", [True, False])
async def test_it_shows_images_to_a_model_that_takes_them(sees: bool, agent_hosts: ZygoteHosts) -> None:
    entry = await AgentCatalog(agent_hosts).resolve(AgentSpec(name="my_agents:Shows"))
    assert entry.shows_pictures
    model = ScriptedModel(says("a cat"), sees=sees)
    task = some_task(tools=["my_tools:picture"], pictures=[{"url": "https://a.example/b.png", "at": 0}])
    async with ToolCatalog(agent_hosts).open(task, None) as tools:
        result = await entry.make({}).run(some_episode(model, tools, task=task))
    if not sees:
        assert (result.answer, model.shown, model.asked) == ("not seen", [b"PNG"], [])
        return
    assert result.answer == "a cat"
    assert model.shown == [b"PNG", "https://a.example/b.png"]
    ((first, second),) = model.asked
    assert (first.content, [image.url for image in first.images]) == ("do it", ["https://a.example/b.png"])
    assert [image.digest for image in second.images] == [digest_of(b"PNG")]


async def test_it_forks_its_sandbox_and_reaches_a_port(agent_hosts: ZygoteHosts) -> None:
    entry = await AgentCatalog(agent_hosts).resolve(AgentSpec(name="my_agents:Forks"))
    with open_folder() as data_dir:
        runtime = BubblewrapRuntime(data_dir=data_dir)
        try:
            if "snapshot" not in runtime.report().can:
                pytest.skip("bubblewrap takes no snapshots here")
            box = await runtime.create(SandboxSpec(), owner="test", ttl_s=100)
            if (await box.exec("command -v perl")).exit_code != 0:
                pytest.skip("the host has no perl")

            async def fork(snapshot: str) -> Sandbox:
                return await runtime.create(SandboxSpec(snapshot=snapshot), owner="test", ttl_s=100)

            plain = some_episode(ScriptedModel(), BuiltToolbox({}, {}))
            result = await entry.make({}).run(replace(plain, sandbox=box, fork=fork))
            assert result.answer == "start left start closed owned port port"
        finally:
            await runtime.close()


@pytest.mark.parametrize(
    ("name", "says_so"),
    [
        ("Crash", "ZeroDivisionError: by me"),
        ("Leave", "exited with status 9"),
        ("Wrong", "returned dict"),
        ("BadWords", "Invalid enum value 'nobody'"),
    ],
)
async def test_its_crash_is_an_agent_failure(agent_hosts: ZygoteHosts, name: str, says_so: str) -> None:
    with pytest.raises(AgentFailure) as caught:
        await run(agent_hosts, name)
    assert says_so in str(caught.value)
    assert caught.value.operation == f"agent my_agents:{name}"


@pytest.mark.parametrize(
    ("error", "limit"),
    [(LimitReached("max_turns", "64 turns"), "max_turns"), (ContextTooLong("long"), "context_tokens")],
)
async def test_a_limit_it_lets_escape_truncates_it(
    agent_hosts: ZygoteHosts, error: Exception, limit: str
) -> None:
    assert (await run(agent_hosts, "Solver", error))[0] == AgentResult(truncated_by=limit)


async def test_a_limit_reaches_its_code_as_the_same_class(agent_hosts: ZygoteHosts) -> None:
    result, _ = await run(agent_hosts, "Careful", LimitReached("max_turns", "64 turns"))
    assert result == AgentResult(answer="kept", truncated_by="max_turns")


async def test_infrastructure_keeps_its_kind(agent_hosts: ZygoteHosts) -> None:
    with pytest.raises(BackendUnavailable, match="nothing answers"):
        await run(agent_hosts, "Solver", BackendUnavailable("nothing answers"))


async def test_a_call_it_gives_up_is_given_up_here(agent_hosts: ZygoteHosts) -> None:
    result, model = await run(agent_hosts, "Impatient")
    assert result.answer == "gave up"
    assert model.cancelled == 1


async def test_a_cancel_ends_model_call_and_process(agent_hosts: ZygoteHosts) -> None:
    entry = await AgentCatalog(agent_hosts).resolve(AgentSpec(name="my_agents:Solver"))
    model = ScriptedModel()
    task = asyncio.create_task(entry.make({}).run(some_episode(model, BuiltToolbox({}, {}))))
    await model.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert model.cancelled == 1
    assert agent_hosts.live == 0


async def test_agents_are_found_by_name_or_path(agent_hosts: ZygoteHosts) -> None:
    catalog = AgentCatalog(agent_hosts, installed={"solver": "my_agents:Solver"})
    assert {"solver", "tool", "command"} <= set(catalog.names)
    await catalog.check(AgentSpec(name="solver", options={"prefix": "x"}))
    await catalog.check(AgentSpec(name="tool", options={"system": "x"}))
    assert not (await catalog.resolve(AgentSpec())).hosted


@pytest.mark.parametrize(
    ("spec", "field", "says_so"),
    [
        ({"name": "tol"}, "agent.name", "did you mean 'tool'?"),
        ({"name": "my_agents:Solvr"}, "agent.name", "did you mean 'Solver'?"),
        ({"name": "my_agents:NotAsync"}, "agent.name", "async def run"),
        ({"name": "tool", "options": {"sytem": "x"}}, "agent.options.sytem", "did you mean 'system'?"),
        ({"name": "tool", "options": {"stop_on_text": "maybe"}}, "agent.options.stop_on_text", "bool"),
        ({"name": "my_agents:Solver", "options": {"prefx": 1}}, "agent.options.prefx", "'prefix'"),
        ({"name": "my_agents:Solver", "options": {"turns": "x"}}, "agent.options.turns", "integer"),
        ({"name": "my_agents:Needs"}, "agent.options.key", "is required"),
    ],
)
async def test_a_bad_agent_is_named_before_anything_starts(
    agent_hosts: ZygoteHosts, spec: dict[str, object], field: str, says_so: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await AgentCatalog(agent_hosts).check(AgentSpec.model_validate(spec))
    assert caught.value.field == field
    assert says_so in str(caught.value)
    assert isinstance(caught.value, UnknownName) == (spec["name"] == "tol")
