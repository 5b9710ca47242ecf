"""Real parts: ``rollserve serve`` as a process, workers, sandboxes, and an inference server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from rollserve.cli.processes import Processes, Running
from rollserve.client import Client, FinishedGroup, RunHandle
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import RetrySettings, RunState
from rollserve.records.task import GraderSpec, Limits, Task
from rollserve.sandbox.registry import make_runtime
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.testing.scripted_turns import episode
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend

CODE = Path(__file__).parent / "user_code"


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Real sandboxes where this machine can make them."""
    report = make_runtime("bubblewrap", tmp_path_factory.mktemp("runtime")).report()
    return "bubblewrap" if report.usable else "process"


class Server:
    """``rollserve serve`` on a folder; may be killed and started again on it."""

    def __init__(self, folder: Path, runtime: str, *settings: str) -> None:
        self.folder = folder
        self.code = CODE
        self._runtime = runtime
        self._settings = settings
        self._processes = Processes(folder / "logs")
        self.url = f"http://127.0.0.1:{self._processes.port()}"
        self.running: Running | None = None

    async def start(self) -> None:
        command = [
            *(sys.executable, "-m", "rollserve", "serve", "--port", self.url.rsplit(":", 1)[1]),
            *("--data-dir", str(self.folder / "data"), "--runtime", self._runtime),
            *("--code-dir", str(self.code)),
            *(part for setting in self._settings for part in ("--set", setting)),
        ]
        if self._runtime == "process":
            command.append("--allow-unsafe-runtime")
        self.running = self._processes.start("server", command)
        await self._processes.wait_ready(self.running, f"{self.url}/readyz", 180)

    @property
    def pid(self) -> int:
        assert self.running is not None
        return self.running.process.pid

    def kill(self) -> None:
        """The server alone, by SIGKILL; its workers have to notice by themselves."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.running is not None
        self.running.process.wait()
        self._processes.forget(self.running)

    def stop(self) -> None:
        self._processes.stop()

    def client(self) -> Client:
        return Client(self.url)


@pytest.fixture
def make_server(tmp_path: Path, runtime: str) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(*settings: str) -> Server:
        made.append(Server(tmp_path, runtime, *settings))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
async def server(make_server: Callable[..., Server]) -> Server:
    one = make_server()
    await one.start()
    return one


@pytest.fixture(scope="module")
def lasting_server(tmp_path_factory: pytest.TempPathFactory, runtime: str) -> Iterator[Server]:
    """One for the tests of a file, which take it as ``shared_server``."""
    one = Server(tmp_path_factory.mktemp("server"), runtime)
    try:
        asyncio.run(one.start())
        yield one
    finally:
        one.stop()


@pytest.fixture
async def shared_server(lasting_server: Server) -> AsyncIterator[Server]:
    """For tests that leave it running and ask nothing of what others left: older runs, all of them closed,
    and policies without a backend."""
    yield lasting_server
    async with lasting_server.client() as client:
        for state in (RunState.OPEN, RunState.PAUSED):
            for run in (await client.runs(state=state)).items:
                await (await client.run(run.id)).close()
        for policy in (await client.policies()).items:
            for backend in await client.backends(policy.spec.name):
                await client.remove_backend(policy.spec.name, backend.id)
            await client.resume_policy(policy.spec.name)


@pytest.fixture
def engine() -> ScriptedEngine:
    """Three turns: two shell commands, then the answer 42."""
    return ScriptedEngine(label="0")


@pytest.fixture
async def backend_url(engine: ScriptedEngine) -> AsyncIterator[str]:
    turns = episode(
        turns=3, tokens=40, tool="shell", arguments='{"command": "cat note; pwd"}', final_text="42"
    )
    async with serving(ScriptedApp(engine, turns)) as url:
        yield url


async def add_policy(client: Client, backend_url: str, name: str = "tiny") -> None:
    await client.create_policy(
        CreatePolicy(
            name=name,
            model="scripted",
            tokenizer="tiny",
            renderer=RendererSpec(name="qwen3", options={"enable_thinking": False}),
        )
    )
    await client.register_backend(name, RegisterBackend(url=backend_url, kind=BackendKind.VLLM))


def shell_task(**changes: object) -> Task:
    """Reads a note twice, answers 42, is graded by the number."""
    base = Task(
        instruction="What is in the note?",
        files={"note": "the answer is 42\n"},
        tools=["shell"],
        grader=GraderSpec(name="numeric", options={"answer": 42}),
        limits=Limits(run_s=60, command_s=20),
    )
    return base.model_copy(update=changes)


async def finished(run: RunHandle, count: int) -> list[FinishedGroup]:
    done: list[FinishedGroup] = []
    async with aclosing(run.groups(auto_ack=False)) as groups:
        while len(done) < count:
            group = await anext(groups)
            await group.ack()
            done.append(group)
    return done


async def one(client: Client, backend_url: str, **changes: object) -> FinishedGroup:
    """A group of one rollout, from its policy to its end."""
    await add_policy(client, backend_url)
    return await play(client, **changes)


async def play(client: Client, **changes: object) -> FinishedGroup:
    retry = RetrySettings(max_attempts=2, backoff_s=0.01)
    run = await client.open_run(OpenRun(policy="tiny", retry=retry))
    await run.submit([shell_task(**changes)], num_rollouts=1)
    (group,) = await finished(run, 1)
    return group


def descendants(pid: int) -> set[int]:
    """Living processes below ``pid``."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            try:
                children = {int(child) for child in task.read_text().split()}
            except OSError:
                continue
            todo += children - found
            found |= children
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that run still; a zombie does not."""
    living = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            living.add(pid)
    return living


async def gone(pids: set[int]) -> None:
    """Until none of them runs any more."""
    await until(lambda: not alive(pids))


async def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)
