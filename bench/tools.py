"""What a tool call costs in a sandbox, beside a raw pipe echo in the same run:
``.venv/bin/python bench/tools.py [--calls N] [--runtime bubblewrap|process]``."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rollserve.agent.toolbox import BuiltToolbox, ToolCatalog
from rollserve.records.task import GraderSpec, Task
from rollserve.sandbox.base import Sandbox, SandboxSpec
from rollserve.sandbox.registry import make_runtime
from rollserve.usercode.hosts import ZygoteHosts

TOOLS = ["shell", "bash", "python", "str_replace_editor", "search"]
FILES = {f"src/module_{i}.py": f"value_{i} = {i}\n".encode() * 40 for i in range(200)}
EDITED = "edited.txt"
WARM_UP = 20

Call = Callable[[], Awaitable[object]]


def report(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    p95 = ordered[int(len(ordered) * 0.95)]
    p50 = statistics.median(ordered)
    print(f"{name:40} p50 {p50 * 1e3:8.3f} ms   p95 {p95 * 1e3:8.3f} ms   n {len(ordered)}")


async def measure(name: str, call: Call, calls: int) -> None:
    for _ in range(WARM_UP):
        await call()
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - began)
    report(name, seconds)


def measure_floor(calls: int) -> None:
    """A line to ``cat`` and back, blocking, no sandbox and no event loop."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as cat:
        assert cat.stdin is not None
        assert cat.stdout is not None
        seconds = []
        for _ in range(calls + WARM_UP):
            began = time.perf_counter()
            cat.stdin.write(b"hi\n")
            assert cat.stdout.read(65536) == b"hi\n"
            seconds.append(time.perf_counter() - began)
        cat.stdin.close()
    report("floor: raw pipe echo, cat, blocking", seconds[WARM_UP:])


async def measure_starts(sandbox: Sandbox, calls: int) -> None:
    async def program() -> None:
        started = await sandbox.spawn("exec cat", on_errors=lambda data: None)
        await started.write(b"hi\n")
        await started.read()
        await started.kill()

    async def console() -> None:
        opened = await sandbox.open_console()
        await opened.close()

    await measure("spawn cat, first echo, kill", program, calls)
    await measure("open and close a console (bash)", console, calls)


async def measure_pipes(sandbox: Sandbox, calls: int) -> None:
    program = await sandbox.spawn("exec cat", on_errors=lambda data: None)

    async def echo() -> None:
        await program.write(b"hi\n")
        assert await program.read() == b"hi\n"

    await measure("program in the sandbox, cat echo", echo, calls)
    await program.kill()
    await measure("Sandbox.exec echo", lambda: sandbox.exec("echo hi"), calls)
    await measure("Sandbox.exec /bin/true", lambda: sandbox.exec("/bin/true"), calls)


async def measure_tools(tools: BuiltToolbox, calls: int) -> None:
    def call(tool: str, **arguments: object) -> Call:
        text = json.dumps(arguments)

        async def one() -> None:
            result = await tools.call(tool, text)
            assert not result.is_error, result.text

        return one

    turn = False

    async def edit() -> None:
        nonlocal turn
        old, turn = ("one", "two")[turn], not turn
        new = ("one", "two")[turn]
        await call("str_replace_editor", command="str_replace", path=EDITED, old_str=old, new_str=new)()

    await measure("shell: echo", call("shell", command="echo hi"), calls)
    await measure("bash: echo", call("bash", command="echo hi"), calls)
    await measure("bash: echo, another session", call("bash", command="echo hi", session="x"), calls)
    await measure("bash: cat with input", call("bash", command="cat", input="hi\n"), calls // 4)
    await measure("python: 1 + 1", call("python", code="1 + 1"), calls)
    await measure("python: print", call("python", code="print('hi')"), calls)
    view = call("str_replace_editor", command="view", path="src/module_1.py", view_range=[1, 20])
    await measure("str_replace_editor: view 20 lines", view, calls // 4)
    await measure("str_replace_editor: str_replace", edit, calls // 4)
    await measure("search: 200 files", call("search", pattern="value_77"), calls // 10)


@asynccontextmanager
async def opened(runtime_name: str, folder: Path) -> AsyncIterator[tuple[Sandbox, BuiltToolbox]]:
    runtime = make_runtime(runtime_name, folder)
    hosts = ZygoteHosts(code_dir=None)
    task = Task(instruction="bench", grader=GraderSpec(name="exact", options={"answer": ""}), tools=TOOLS)
    try:
        spec = SandboxSpec(files={**FILES, EDITED: b"one\n" + b"line\n" * 200})
        sandbox = await runtime.create(spec, owner="bench", ttl_s=600)
        async with ToolCatalog(hosts).open(task, sandbox) as tools:
            yield sandbox, tools
    finally:
        await runtime.close()
        await hosts.close()


async def run(runtime_name: str, calls: int) -> None:
    measure_floor(calls)
    with tempfile.TemporaryDirectory() as folder:
        async with opened(runtime_name, Path(folder)) as (sandbox, tools):
            await measure_starts(sandbox, max(20, calls // 20))
            await measure_pipes(sandbox, calls)
            await measure_tools(tools, calls)
    measure_floor(calls)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--runtime", default="bubblewrap")
    given = parser.parse_args()
    asyncio.run(run(given.runtime, given.calls))


if __name__ == "__main__":
    main()
