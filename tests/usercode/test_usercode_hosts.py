"""Code hosts with real processes: what user code can do to them, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollserve.errors import InfrastructureFailure, InvalidInput
from rollserve.sandbox.tools import ToolResult
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeHost, Ending, Role, Use
from rollserve.usercode.hosts import HostSettings, ZygoteHosts

DEADLINE_S = 30.0


def order(name: str, **arguments: Any) -> params.RunTool:
    return params.RunTool(path=f"good:{name}", arguments_json=json.dumps(arguments).encode(), sandbox_id=None)


async def ask(host: CodeHost, name: str, *, timeout_s: float = DEADLINE_S, **arguments: Any) -> str:
    result = await host.call("tool", order(name, **arguments), ToolResult, timeout_s=timeout_s)
    return result.text


async def once(
    hosts: ZygoteHosts,
    name: str,
    *,
    log: list[str] | None = None,
    timeout_s: float = DEADLINE_S,
    **arguments: Any,
) -> str:
    lines = [] if log is None else log
    async with hosts.open(Use.LEAF, handlers={}, log=lines.append) as host:
        return await ask(host, name, timeout_s=timeout_s, **arguments)


def is_alive(pid: int) -> bool:
    """A zombie is dead: it waits for its reaper, not for anything of ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def until(true: Callable[[], bool]) -> None:
    """For what only the system knows: look again and again, in a thread."""

    def watch() -> bool:
        deadline = time.monotonic() + DEADLINE_S
        while not (done := true()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return done

    assert await asyncio.to_thread(watch)


async def until_gone(*pids: int) -> None:
    await until(lambda: not any(is_alive(pid) for pid in pids))


# -- what a use gives


async def test_calls_run_and_what_is_printed_is_logged(hosts: ZygoteHosts) -> None:
    log: list[str] = []
    assert await once(hosts, "add", log=log, a=1) == "3"
    assert log == ["adding 1 2"]
    assert await once(hosts, "later", text="ü") == "ü"
    assert json.loads(await once(hosts, "odd_names", json={"a": 10**30})) == {
        "json": {"a": 10**30},
        "_hidden": 1,
        "schema": "s",
    }
    assert json.loads(await once(hosts, "point")) == {"x": 1}


async def test_a_host_keeps_state_between_calls_and_hosts_share_none(hosts: ZygoteHosts) -> None:
    async with (
        hosts.open(Use.LEAF, handlers={}, log=print) as first,
        hosts.open(Use.LEAF, handlers={}, log=print) as second,
    ):
        assert [await ask(first, "count") for _ in range(3)] == ["1", "2", "3"]
        assert await ask(second, "count") == "1"
        assert await ask(first, "pid") != await ask(second, "pid")


async def test_hosts_draw_different_random_numbers(hosts: ZygoteHosts) -> None:
    await hosts.describe("good:add", Role.TOOL, field="tools.0")
    draws = {await once(hosts, "first_draw") for _ in range(4)}
    assert len(draws) == 4


async def test_the_services_settings_are_not_in_the_environment(
    hosts: ZygoteHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLSERVE_API_KEY", "secret")
    monkeypatch.setenv("JUDGE_KEY", "theirs")
    environment = json.loads(await once(hosts, "environment"))
    assert not [name for name in environment if name.startswith("ROLLSERVE_")]
    assert environment["JUDGE_KEY"] == "theirs"


async def test_wrong_arguments_name_the_parameter(hosts: ZygoteHosts) -> None:
    async with hosts.open(Use.LEAF, handlers={}, log=print) as host:
        with pytest.raises(InvalidInput, match="valid integer") as caught:
            await ask(host, "add", a="many")
        assert caught.value.field == "a"
        with pytest.raises(InvalidInput, match="required"):
            await ask(host, "add")
        with pytest.raises(InvalidInput, match=r"did you mean 'a'"):
            await ask(host, "add", a=1, aa=2)
        assert await ask(host, "add", a="3") == "5"


# -- how user code can fail


@pytest.mark.parametrize(
    ("name", "ending", "message", "trace"),
    [
        ("crash", Ending.RAISED, "KeyError: 'nope'", 'raise KeyError("nope")'),
        ("crash_silly", Ending.RAISED, "Silly", "Silly"),
        ("recurse", Ending.RAISED, "RecursionError", "recurse()"),
        ("leave", Ending.EXITED, "sys.exit(3)", "SystemExit"),
        ("leave_hard", Ending.EXITED, "status 7", ""),
        ("segfault", Ending.KILLED, "SIGSEGV", "last words"),
        ("killed", Ending.KILLED, "SIGKILL", ""),
        ("garbage", Ending.PROTOCOL, "wrote on its channel", ""),
        ("too_big", Ending.RAISED, "too large", ""),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_crash_says_what_happened(
    shared_hosts: ZygoteHosts, name: str, ending: Ending, message: str, trace: str
) -> None:
    with pytest.raises(CodeFault) as caught:
        await once(shared_hosts, name)
    assert caught.value.ending is ending
    assert message in caught.value.message
    assert trace in caught.value.trace
    assert len(caught.value.report) < 10_000
    assert await once(shared_hosts, "add", a=1) == "3"
    assert shared_hosts.live == 0


async def test_the_host_survives_what_a_call_raised(hosts: ZygoteHosts) -> None:
    async with hosts.open(Use.LEAF, handlers={}, log=print) as host:
        with pytest.raises(CodeFault):
            await ask(host, "crash")
        assert host.alive
        assert await ask(host, "add", a=1) == "3"


async def test_memory_is_bounded_where_asked(code_dir: Path) -> None:
    hosts = ZygoteHosts(code_dir=code_dir, settings=HostSettings(memory_mb=1024))
    try:
        with pytest.raises(CodeFault, match="MemoryError"):
            await once(hosts, "eat_memory")
    finally:
        await hosts.close()


# -- deadlines and cancels


@pytest.mark.parametrize("name", ["spin", "stubborn", "async_stubborn"])
@pytest.mark.asyncio(loop_scope="module")
async def test_what_does_not_stop_is_killed_at_the_deadline(shared_hosts: ZygoteHosts, name: str) -> None:
    async with shared_hosts.open(Use.LEAF, handlers={}, log=print) as host:
        pid = int(await ask(host, "pid"))
        with pytest.raises(CodeFault) as caught:
            await ask(host, name, timeout_s=0.2)
        assert caught.value.ending is Ending.TIMED_OUT
        assert not host.alive
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("name", "grace_s"), [("spin", 0.3), ("stubborn", 0.3), ("async_stubborn", 0.3), ("async_polite", 30.0)]
)
async def test_cancelling_the_use_ends_the_process_and_not_the_loop(
    code_dir: Path, name: str, grace_s: float
) -> None:
    hosts = ZygoteHosts(code_dir=code_dir, settings=HostSettings(cancel_grace_s=grace_s))
    log: list[str] = []
    begun, pids = asyncio.Event(), []

    def line(text: str) -> None:
        log.append(text)
        begun.set()

    async def use() -> None:
        async with hosts.open(Use.AGENT, handlers={}, log=line) as host:
            pids.append(int(await ask(host, "pid")))
            await ask(host, name)

    task = asyncio.create_task(use())
    async with asyncio.timeout(DEADLINE_S):
        await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(pids[0])
    assert hosts.live == 0
    assert ("cleaned up" in log) == (name == "async_polite")
    await hosts.close()


async def test_a_cancelled_request_of_the_host_is_cancelled_here(hosts: ZygoteHosts) -> None:
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def never(data: bytes) -> object:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return None

    async def use() -> None:
        handlers = {"sandbox.read_file": never}
        async with hosts.open(Use.LEAF, handlers=handlers, log=print) as host:
            tool = params.RunTool(path="good:reads_async", arguments_json=b'{"path": "x"}', sandbox_id="s")
            await host.call("tool", tool, ToolResult, timeout_s=DEADLINE_S)

    task = asyncio.create_task(use())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


# -- output


async def test_a_flood_of_output_is_bounded_and_does_not_block_the_code(code_dir: Path) -> None:
    hosts = ZygoteHosts(code_dir=code_dir, settings=HostSettings(log_limit_chars=10_000))
    log: list[str] = []
    try:
        assert await once(hosts, "flood", log=log, lines=10_000) == "done"
        assert sum(map(len, log)) < 11_000
        assert log[-1].startswith("[the log's bound is reached")
        with pytest.raises(CodeFault):
            await once(hosts, "flood_for_ever", timeout_s=0.2)
    finally:
        await hosts.close()


async def test_bytes_that_are_no_text_are_kept_readable(hosts: ZygoteHosts) -> None:
    log: list[str] = []
    await once(hosts, "binary", log=log)
    assert log == ["\\xff\\xfe text", "no newline at the end"]


# -- numbers, slots


async def test_fifty_at_once(code_dir: Path) -> None:
    hosts = ZygoteHosts(code_dir=code_dir, max_hosts=50)
    together = asyncio.Barrier(50)

    async def use(number: int) -> str:
        async with hosts.open(Use.LEAF, handlers={}, log=lambda line: None) as host:
            await together.wait()
            return await ask(host, "add", a=number, b=0)

    try:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(use(number) for number in range(50)))
        assert answers == [str(number) for number in range(50)]
        assert hosts.live == 0
    finally:
        await hosts.close()


async def test_slots_are_bounded_and_agents_can_not_starve_their_tools(code_dir: Path) -> None:
    hosts = ZygoteHosts(code_dir=code_dir, max_hosts=1)
    paused = asyncio.Event()

    class Pause:
        def __enter__(self) -> None:
            paused.set()

        def __exit__(self, *exc: object) -> None:
            paused.clear()

    async def second() -> str:
        async with hosts.open(Use.AGENT, handlers={}, log=print, pause=Pause) as host:
            return await ask(host, "add", a=1)

    try:
        async with hosts.open(Use.AGENT, handlers={}, log=print):
            waiting = asyncio.create_task(second())
            await paused.wait()
            assert await once(hosts, "add", a=5) == "7"
            assert not waiting.done()
        assert await waiting == "3"
        assert not paused.is_set()
    finally:
        await hosts.close()


async def test_a_waiter_that_is_cancelled_takes_no_slot(code_dir: Path) -> None:
    hosts = ZygoteHosts(code_dir=code_dir, max_hosts=1)
    try:
        async with hosts.open(Use.LEAF, handlers={}, log=print):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await once(hosts, "add", a=1)
        assert await once(hosts, "add", a=1) == "3"
    finally:
        await hosts.close()


# -- what is left behind


async def test_daemons_of_the_user_are_gone_with_the_use(hosts: ZygoteHosts, tmp_path: Path) -> None:
    path = tmp_path / "daemon.pid"
    await once(hosts, "daemon", path=str(path))
    await until_gone(int(path.read_text()))


async def test_close_ends_running_hosts(hosts: ZygoteHosts) -> None:
    async with hosts.open(Use.LEAF, handlers={}, log=print) as host:
        pid = int(await ask(host, "pid"))
        task = asyncio.create_task(ask(host, "spin"))
        await hosts.close()
        with pytest.raises(InfrastructureFailure):
            await task
        await until_gone(pid)
    with pytest.raises(InfrastructureFailure, match="closed"):
        await once(hosts, "add", a=1)


async def test_a_killed_zygote_is_an_infrastructure_failure_and_is_replaced(hosts: ZygoteHosts) -> None:
    async with hosts.open(Use.LEAF, handlers={}, log=print) as host:
        pid = int(await ask(host, "pid"))
        zygote = parent(pid)
        task = asyncio.create_task(ask(host, "spin"))
        os.kill(zygote, signal.SIGKILL)
        with pytest.raises(InfrastructureFailure):
            await task
    await until_gone(pid)
    assert await once(hosts, "add", a=1) == "3"


WORKER = """
import asyncio, sys
from pathlib import Path
from rollserve.usercode import params
from rollserve.usercode.base import Use
from rollserve.usercode.hosts import ZygoteHosts
from rollserve.sandbox.tools import ToolResult

def order(name, arguments=b"{}"):
    return params.RunTool(path=f"good:{name}", arguments_json=arguments, sandbox_id=None)

async def use(hosts, name, arguments, pids):
    async with hosts.open(Use.LEAF, handlers={}, log=lambda line: None) as host:
        result = await host.call("tool", order("pid"), ToolResult, timeout_s=None)
        pids.append(result.text)
        if len(pids) == 4:
            print(*pids, flush=True)
        await host.call("tool", order(name, arguments), ToolResult, timeout_s=None)
        await host.call("tool", order("spin"), ToolResult, timeout_s=None)

async def main():
    hosts, pids = ZygoteHosts(code_dir=Path(sys.argv[1])), []
    daemon = b'{"path": "%s/daemon.pid"}' % sys.argv[1].encode()
    uses = [("spin", b"{}"), ("stubborn", b"{}"), ("async_stubborn", b"{}"), ("daemon", daemon)]
    async with asyncio.TaskGroup() as group:
        for name, arguments in uses:
            group.create_task(use(hosts, name, arguments, pids))
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_nothing_outlives_a_worker_that_was_killed(code_dir: Path) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, str(code_dir)), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            pids = [int(pid) for pid in (await worker.stdout.readline()).split()]
        assert len(pids) == 4
        await until((code_dir / "daemon.pid").exists)
        pids.append(int((code_dir / "daemon.pid").read_text()))
        assert all(is_alive(pid) for pid in pids)
    finally:
        worker.kill()
        await worker.communicate()
    await until_gone(*pids)
