"""MCP servers as tools, with the official client: programs of a real sandbox, and one behind a URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollserve.agent.mcp_servers import MAX_STARTS
from rollserve.agent.toolbox import BuiltToolbox, ToolCatalog
from rollserve.errors import InfrastructureFailure, InvalidInput, NotFound, SandboxError
from rollserve.sandbox.base import Sandbox, SandboxSpec
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.process import ProcessRuntime
from rollserve.testing.fakes import some_task
from rollserve.testing.runtime_probes import (
    processes_with,
    unique_seconds,
    wait_until_gone,
    wait_until_present,
)
from rollserve.usercode.hosts import ZygoteHosts

SERVER = (Path(__file__).parent / "mcp_server.py").read_bytes()
HTTP_SERVER = (Path(__file__).parent / "mcp_http_server.py").read_bytes()
COMMAND = ["python3", "server.py"]


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[ZygoteHosts]:
    found = ZygoteHosts(code_dir=tmp_path)
    yield found
    await found.close()


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    runtime = ProcessRuntime(data_dir=tmp_path)
    spec = SandboxSpec(files={"server.py": SERVER})
    yield await runtime.create(spec, owner="test", ttl_s=100)
    await runtime.close()


@asynccontextmanager
async def opened(
    hosts: ZygoteHosts, box: Sandbox | None, *, command_s: float = 20, **servers: Any
) -> AsyncIterator[BuiltToolbox]:
    task = some_task(tools=["echo"], mcp_servers=servers, limits={"command_s": command_s})
    catalog = ToolCatalog(hosts)
    await catalog.check(task)
    async with catalog.open(task, box) as tools:
        yield tools


def names(tools: BuiltToolbox) -> list[str]:
    return [schema["function"]["name"] for schema in tools.schemas]


async def test_tools_carry_the_servers_name_and_schema(hosts: ZygoteHosts, box: Sandbox) -> None:
    async with opened(hosts, box, calc={"command": COMMAND, "tools": ["add"]}) as tools:
        assert names(tools) == ["echo", "calc__add"]
        function = tools.schemas[1]["function"]
        assert function["description"] == "Add two numbers."
        assert function["parameters"]["required"] == ["a", "b"]
        assert (await tools.call("calc__add", '{"a": 1, "b": 41}')).text == "42"
        wrong = await tools.call("calc__add", '{"a": 1, "c": 2}')
        assert wrong.is_error
        assert "`c` is not known" in wrong.text
        assert "`b` is required (integer)" in wrong.text


async def test_every_name_is_one_that_models_may_write(hosts: ZygoteHosts, box: Sandbox) -> None:
    async with opened(hosts, box, s={"command": COMMAND}) as tools:
        odd = [name for name in names(tools) if name.startswith("s__odd_name__")]
        assert [len(name) for name in odd] == [64]
        assert (await tools.call(odd[0], "{}")).text == "odd"
        assert len(names(tools)) == 9


async def test_results_errors_and_images(hosts: ZygoteHosts, box: Sandbox) -> None:
    async with opened(hosts, box, s={"command": COMMAND, "env": {"GREETING": "it's me"}}) as tools:
        assert (await tools.call("s__count", "{}")).text == "1 it's me"
        failed = await tools.call("s__fail", "{}")
        assert (failed.text, failed.is_error) == ("no such row", True)
        drawn = await tools.call("s__draw", "{}")
        assert drawn.text == "[image/png attached]"
        assert drawn.attachments[0].base64 == "UE5H"
        assert (await tools.call("s__bad_protocol", "{}")).is_error
        assert (await tools.call("s__count", "{}")).text == "2 it's me"


async def test_a_server_that_dies_is_started_anew(hosts: ZygoteHosts, box: Sandbox) -> None:
    async with opened(hosts, box, s={"command": COMMAND}) as tools:
        await tools.call("s__count", "{}")
        for _ in range(MAX_STARTS - 1):
            died = await tools.call("s__die", "{}")
            assert died.is_error
            assert "ended; the next call starts it anew" in died.text
            assert "I am dying" in died.text
            assert (await tools.call("s__count", "{}")).text == "1 "
        await tools.call("s__die", "{}")
        assert f"has been started {MAX_STARTS} times" in (await tools.call("s__count", "{}")).text


async def test_a_slow_call_times_out_and_others_go_on(hosts: ZygoteHosts, box: Sandbox) -> None:
    servers: dict[str, Any] = {name: {"command": COMMAND} for name in ("one", "two")}
    async with opened(hosts, box, command_s=2, **servers) as tools:
        slow = await tools.call("one__slow", "{}")
        assert slow.is_error
        assert "no answer of the MCP server 'one' in 2 s" in slow.text
        assert (await tools.call("two__count", "{}")).text == "1 "


async def test_a_server_ends_with_the_toolbox(hosts: ZygoteHosts, box: Sandbox) -> None:
    mark = unique_seconds()
    start = ["sh", "-c", f"sleep {mark} & exec python3 server.py"]
    async with opened(hosts, box, s={"command": start}):
        await wait_until_present(mark)
    await wait_until_gone(mark)
    assert (await box.exec("echo on")).output == "on\n"


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({"command": ["/no/such/server"]}, "/no/such/server"),
        ({"command": ["sh", "-c", "echo broken config >&2; exit 1"]}, "broken config"),
        ({"command": ["cat"], "start_s": 0.3}, "does not start"),
        ({"command": ["sleep", "60"], "start_s": 0.3}, "no answer in 0.3 s"),
        ({"command": ["sh", "-c", "head -c 100000000 /dev/zero"], "start_s": 10}, "does not start"),
        ({"command": COMMAND, "tools": ["ad"]}, "has no tool 'ad'"),
    ],
)
async def test_a_server_that_does_not_start_says_why(
    hosts: ZygoteHosts, box: Sandbox, server: dict[str, Any], says: str
) -> None:
    with pytest.raises(InfrastructureFailure) as caught:
        async with opened(hosts, box, s=server):
            raise AssertionError("opened")
    assert says in str(caught.value)
    assert (await box.exec("echo on")).output == "on\n"


async def test_a_cancelled_call_or_start_leaves_nothing(hosts: ZygoteHosts, box: Sandbox) -> None:
    async with opened(hosts, box, s={"command": COMMAND}) as tools:
        call = asyncio.create_task(tools.call("s__slow", "{}"))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    mark = unique_seconds()

    async def never() -> None:
        async with opened(hosts, box, s={"command": ["sleep", mark]}):
            raise AssertionError("opened")

    opening = asyncio.create_task(never())
    while not processes_with(mark):
        await asyncio.sleep(0.01)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not processes_with(mark)


async def test_a_gone_sandbox_is_no_tool_error(hosts: ZygoteHosts, box: Sandbox) -> None:
    async with opened(hosts, box, s={"command": COMMAND}) as tools:
        await box.close()
        with pytest.raises(SandboxError):
            await tools.call("s__count", "{}")


@pytest.mark.parametrize(
    ("server", "field", "says"),
    [
        ({}, "mcp_servers.s", "a command or a url"),
        ({"url": "http://localhost/mcp", "env": {"A": "1"}}, "mcp_servers.s.env", "for a command"),
        *(
            ({"url": url}, "mcp_servers.s.url", "no http address of the sandbox itself")
            for url in (
                *("http://a/mcp", "https://127.0.0.1/mcp", "http://127.0.0.1@a/mcp", "http://10.0.0.1/mcp"),
                *("http://localhost:99999/mcp", "http://localhost:0/mcp", "http://169.254.169.254/"),
            )
        ),
        ({"command": [""]}, "mcp_servers.s.command.0", "is empty"),
    ],
)
async def test_bad_servers_are_named_before_anything_starts(
    hosts: ZygoteHosts, server: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await ToolCatalog(hosts).check(some_task(mcp_servers={"s": server}))
    assert caught.value.field == field
    assert says in str(caught.value)


async def test_a_server_on_a_port_of_the_sandbox(hosts: ZygoteHosts, tmp_path: Path) -> None:
    """Started by its command, and reached without a network; or started by the agent's side."""
    runtime = BubblewrapRuntime(data_dir=tmp_path / "data")
    if not (report := runtime.report()).usable:
        pytest.skip(f"bubblewrap can't be used here: {report.detail}")
    try:
        spec = SandboxSpec(files={"server.py": HTTP_SERVER})
        box = await runtime.create(spec, owner="test", ttl_s=100)
        command = ["python3", "server.py", "8931"]
        if (await box.exec("command -v python3")).exit_code != 0:
            pytest.skip("the host has no python3")
        server: dict[str, Any] = {"url": "http://127.0.0.1:8931/mcp", "command": command}
        async with opened(hosts, box, calc=server) as tools:
            assert names(tools) == ["echo", "calc__add"]
            assert (await tools.call("calc__add", '{"a": 2, "b": 3}')).text == "5"
            alone: dict[str, Any] = {"url": "http://localhost:8931/mcp"}
            async with opened(hosts, box, calc=alone) as others:
                assert (await others.call("calc__add", '{"a": 2, "b": 4}')).text == "6"
            await box.exec("pkill -f server.py; sleep 0.1")
            await tools.call("calc__add", '{"a": 2, "b": 3}')  # hears of it, unless that was known by then
            assert (await tools.call("calc__add", '{"a": 2, "b": 5}')).text == "7"
        with pytest.raises(NotFound):
            await box.connect(8931)
    finally:
        await runtime.close()


async def test_a_server_whose_port_never_answers(hosts: ZygoteHosts, box: Sandbox) -> None:
    mark = unique_seconds()
    server: dict[str, Any] = {
        "url": "http://127.0.0.1:1/mcp",
        "command": ["sh", "-c", f"echo broken; exec sleep {mark}"],
        "start_s": 0.5,
    }
    with pytest.raises(InfrastructureFailure, match=r"no answer in 0.5 s\nbroken"):
        async with opened(hosts, box, s=server):
            raise AssertionError("opened")
    await wait_until_gone(mark)
