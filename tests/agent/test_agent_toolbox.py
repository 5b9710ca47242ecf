"""Tools of a task: built-in ones, and Python functions in real code hosts."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from rollserve.agent.toolbox import BuiltToolbox, ToolCatalog
from rollserve.errors import InvalidInput, SandboxError, UnknownName
from rollserve.sandbox.base import ExecResult
from rollserve.sandbox.tools import ToolResult
from rollserve.testing.fakes import FakeSandbox, some_task
from rollserve.usercode.hosts import ZygoteHosts

pytestmark = pytest.mark.asyncio(loop_scope="module")


def opened(
    hosts: ZygoteHosts, *tools: str, sandbox: FakeSandbox | None = None, log: list[str] | None = None
) -> AbstractAsyncContextManager[BuiltToolbox]:
    task = some_task(tools=list(tools), limits={"command_s": 2})
    lines = [] if log is None else log
    return ToolCatalog(hosts).open(task, sandbox, log=lines.append)


async def test_built_in_tools_start_no_process(agent_hosts: ZygoteHosts) -> None:
    sandbox = FakeSandbox(lambda command: ExecResult(output="x\n", exit_code=3))
    async with opened(agent_hosts, "shell", "submit", "echo", sandbox=sandbox) as tools:
        result = await tools.call("shell", '{"command": "false"}')
        assert result == ToolResult(text="x\n[exit code 3]", is_error=True)
        assert sandbox.commands == [("false", 2.0)]
        assert (await tools.call("submit", '{"answer": "1"}')).answer == "1"
        assert (await tools.call("echo", '{"text": "1"}')).text == "1"
        assert (await tools.call("echo", '{"text": 1}')).is_error
        assert agent_hosts.live == 0
        assert tools.code == {}


async def test_a_command_that_can_not_be_run_is_an_error_the_model_reads(agent_hosts: ZygoteHosts) -> None:
    def shell(command: str) -> ExecResult:
        raise InvalidInput("a command can't hold a NUL byte", field="command")

    async with opened(agent_hosts, "shell", sandbox=FakeSandbox(shell)) as tools:
        result = await tools.call("shell", '{"command": "a\\u0000b"}')
    assert result.is_error
    assert "NUL" in result.text


async def test_arguments_that_do_not_fit_are_explained(agent_hosts: ZygoteHosts) -> None:
    names = ("str_replace_editor", "bash", "my_tools:remember")
    async with opened(agent_hosts, *names, sandbox=FakeSandbox()) as tools:
        for name, arguments, says in (
            ("str_replace_editor", '{"comand": "view", "path": "f"}', "`comand` is not known (did you mean"),
            ("str_replace_editor", '{"command": "look", "path": "f"}', "`command` must be one of"),
            ("str_replace_editor", '{"command": "view"}', "`path` is required (string)"),
            (
                "str_replace_editor",
                '{"command": "view", "path": "f", "view_range": [1, "b"]}',
                "`view_range.1`",
            ),
            ("bash", '{"command": ["ls"]}', "`command` must be string, not array"),
            ("bash", '{"command": "ls", "timeout_s": 0}', "`timeout_s` must be more than 0"),
            ("remember", '{"word": 7}', "`word` must be string, not integer"),
        ):
            result = await tools.call(name, arguments)
            assert result.is_error
            assert says in result.text
        assert agent_hosts.live == 0


async def test_numbers_written_as_text_are_read(agent_hosts: ZygoteHosts) -> None:
    sandbox = FakeSandbox(files={"/workspace/f": b"one\ntwo\n"})
    sandbox._shell = lambda command: ExecResult(output="file 8\n", exit_code=0)
    async with opened(agent_hosts, "str_replace_editor", sandbox=sandbox) as tools:
        arguments = '{"command": "insert", "path": "f", "insert_line": "1", "new_str": "x"}'
        assert not (await tools.call("str_replace_editor", arguments)).is_error
    assert sandbox.files["/workspace/f"] == b"one\nx\ntwo\n"


async def test_functions_share_a_host_that_ends_with_the_toolbox(agent_hosts: ZygoteHosts) -> None:
    async with opened(agent_hosts, "my_tools:remember", "my_tools:pid", "my_tools:finish") as tools:
        assert (await tools.call("remember", '{"word": "a"}')).text == "a"
        assert (await tools.call("remember", '{"word": "b"}')).text == "a,b"
        assert (await tools.call("pid", "")).text == (await tools.call("pid", "{}")).text
        assert (await tools.call("finish", '{"answer": "42"}')).answer == "42"
        assert agent_hosts.live == 1
        assert set(tools.code) == {"my_tools:remember", "my_tools:pid", "my_tools:finish"}
        assert all(version.startswith("sha256:") for version in tools.code.values())
        assert tools.schemas[0] == {
            "type": "function",
            "function": {
                "name": "remember",
                "description": "Remember a word.",
                "parameters": {
                    "type": "object",
                    "properties": {"word": {"type": "string"}},
                    "required": ["word"],
                    "additionalProperties": False,
                },
            },
        }
    assert agent_hosts.live == 0


async def test_what_a_function_does_wrong_is_an_error_the_model_reads(agent_hosts: ZygoteHosts) -> None:
    log: list[str] = []
    names = ("crash", "die", "slow", "remember")
    async with opened(agent_hosts, *(f"my_tools:{name}" for name in names), log=log) as tools:
        crash = await tools.call("crash", "{}")
        assert crash == ToolResult(text="error: RuntimeError: a fault of the tool", is_error=True)
        assert any('raise RuntimeError("a fault of the tool")' in line for line in log)
        died = await tools.call("die", "{}")
        assert died.is_error
        assert "status 1" in died.text
        assert (await tools.call("remember", '{"word": "again"}')).text == "again"
        slow = await tools.call("slow", "{}")
        assert slow == ToolResult(text="error: still running after 2 s", is_error=True)
        wrong = await tools.call("remember", '{"wrd": "x"}')
        assert wrong.is_error
        assert "word" in wrong.text
        assert (await tools.call("remember", '{"word": "fresh"}')).text == "fresh"


async def test_functions_act_in_the_sandbox(agent_hosts: ZygoteHosts) -> None:
    sandbox = FakeSandbox(
        lambda command: ExecResult(output=f"ran {command}", exit_code=0), files={"/workspace/a": b"text"}
    )
    async with opened(agent_hosts, "my_tools:cat", "my_tools:run", sandbox=sandbox) as tools:
        assert (await tools.call("cat", '{"path": "a"}')).text == "text"
        assert (await tools.call("run", '{"command": "ls"}')).text == "ran ls"
        assert sandbox.files["/workspace/out"] == b"ran ls"
        missing = await tools.call("cat", '{"path": "b"}')
        assert missing.is_error
        assert "no such file" in missing.text
        await sandbox.close()
        with pytest.raises(SandboxError):
            await tools.call("cat", '{"path": "a"}')


@pytest.mark.parametrize(
    ("tools", "field", "says"),
    [
        (["shell", "shel"], "tools.1", "did you mean 'shell'?"),
        (["echo", "echo"], "tools.1", "two tools are called"),
        (["my_tools:run", "my_tools:runn"], "tools.1", "did you mean 'run'?"),
        (["no_such:tool"], "tools.0", "no module named"),
        (["my_agents:Solver"], "tools.0", "is a class"),
    ],
)
async def test_bad_tools_are_named_before_anything_starts(
    agent_hosts: ZygoteHosts, tools: list[str], field: str, says: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await ToolCatalog(agent_hosts).check(some_task(tools=tools))
    assert caught.value.field == field
    assert says in str(caught.value)
    assert isinstance(caught.value, UnknownName) == (says == "did you mean 'shell'?")


async def test_who_needs_a_sandbox(agent_hosts: ZygoteHosts) -> None:
    catalog = ToolCatalog(agent_hosts)
    assert await catalog.needs_sandbox(some_task())
    assert await catalog.needs_sandbox(some_task(tools=["echo", "my_tools:cat"]))
    talks = {"tools": ["echo", "submit", "my_tools:pid"]}
    assert not await catalog.needs_sandbox(some_task(**talks))
    assert await catalog.needs_sandbox(some_task(**talks, mcp_servers={"s": {"command": ["server"]}}))
    with pytest.raises(InvalidInput, match="needs a sandbox"):
        async with opened(agent_hosts, "shell"):
            raise AssertionError("opened")
