"""``submit --wait``: it says what is in the way, why rollouts failed, and leaves when told to."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.progress import Progress

from rollserve.cli.obstacles import Obstacle
from rollserve.cli.submit import SOME_CANCELLED, SOME_FAILED
from rollserve.cli.waiting import AGAIN_AFTER_LOOKS, Teller
from rollserve.client import Client
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import RunState
from rollserve.records.task import AgentSpec
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend
from tests.cli.test_cli_commands import rollserve
from tests.integration.conftest import Server, add_policy, shell_task


async def add_lonely(client: Client) -> None:
    """A policy without a backend."""
    renderer = RendererSpec(name="qwen3", options={"enable_thinking": False})
    await client.create_policy(
        CreatePolicy(name="lonely", model="scripted", tokenizer="tiny", renderer=renderer)
    )


def write_tasks(folder: Path, count: int = 1, **changes: object) -> str:
    path = folder / "tasks.jsonl"
    path.write_text(f"{shell_task(**changes).model_dump_json()}\n" * count)
    return str(path)


def test_what_is_in_the_way_is_said_once_and_then_again(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(disable=True)
    bar = progress.add_task("groups", note="")
    teller = Teller(progress, bar)

    def told(*found: Obstacle) -> str:
        teller.tell(list(found))
        return " ".join(capsys.readouterr().err.split())

    some, other = Obstacle("no backend", "type x"), Obstacle("slow", "wait", stops=False)
    assert told(some) == "no backend; type x"
    assert progress.tasks[bar].fields["note"] == "no backend"
    assert told(some, other) == "slow; wait"
    again = [told(some, other) for _ in range(AGAIN_AFTER_LOOKS)]
    assert again == [*[""] * (AGAIN_AFTER_LOOKS - 1), "no backend; type x slow; wait"]
    assert told(other) == ""
    assert progress.tasks[bar].fields["note"] == ""
    assert told() == "nothing is in the way any more"
    assert told() == ""


class Waiting:
    """A ``submit --wait`` that runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""

    async def until(self, words: str) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while words not in self.said:
                line = await self.process.stderr.readline()
                assert line, self.said
                self.said += line.decode()

    async def end(self) -> tuple[int, str]:
        out, err = await asyncio.wait_for(self.process.communicate(), 60)
        self.said += err.decode()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode()


@asynccontextmanager
async def submitting(*arguments: str) -> AsyncIterator[Waiting]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollserve", "submit", *arguments, "--wait"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Waiting(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_policy_without_backend_is_said_at_once(
    shared_server: Server, backend_url: str, tmp_path: Path
) -> None:
    tasks = write_tasks(tmp_path)
    at = ("--url", shared_server.url)
    async with shared_server.client() as client:
        await add_lonely(client)
        code, _, said = await rollserve("submit", tasks, "--policy", "lonely", *at)
        assert code == 0
        assert "policy 'lonely' has no backend" in said
        async with submitting(tasks, "--policy", "lonely", *at) as waiting:
            await waiting.until("has no backend; register one: `rollserve policy add-backend lonely http")
            spec = RegisterBackend(url=backend_url, kind=BackendKind.VLLM)
            await client.register_backend("lonely", spec)
            code, out = await waiting.end()
    assert (code, "1 rollout, 1 graded, mean reward 1.000" in out) == (0, True)


async def test_what_is_paused_or_does_not_answer(
    shared_server: Server, backend_url: str, tmp_path: Path
) -> None:
    async with shared_server.client() as client:
        await add_policy(client, backend_url)
        await client.pause_policy("tiny")
        run = await client.open_run(OpenRun(policy="tiny"))
        await run.pause()
        (backend,) = await client.backends("tiny")
        await client.drain_backend("tiny", backend.id)
        async with submitting(
            write_tasks(tmp_path), "--policy", "tiny", "--run", run.id, "--url", shared_server.url
        ) as waiting:
            await waiting.until(f"run {run.id} is paused; `rollserve run resume {run.id}`")
            await waiting.until("policy 'tiny' is paused; `rollserve policy resume tiny`")
            await waiting.until("policy 'tiny' has no healthy backend")
            await waiting.until(f"backend {backend_url} is being drained; `rollserve policy add-backend tiny")


async def test_failures_are_counted_with_their_reasons(
    shared_server: Server, backend_url: str, tmp_path: Path
) -> None:
    async with shared_server.client() as client:
        await add_policy(client, backend_url)
    tasks = write_tasks(tmp_path, 2, agent=AgentSpec(name="my_agents:Crasher"))
    asked = ("submit", tasks, "--policy", "tiny", "-n", "2", "--wait", "--url", shared_server.url)
    code, out, _ = await rollserve(*asked, "--json")
    assert code == SOME_FAILED
    found = json.loads(out)
    assert (found["failed"], found["cancelled"]) == (4, 0)
    (reason,) = found["failures"]
    assert (reason["kind"], reason["code"], reason["count"]) == ("agent", "agent_failure", 4)
    code, out, _ = await rollserve(*asked)
    assert code == SOME_FAILED
    assert "4 rollouts, 0 graded, mean reward none, 4 failed" in out
    row = next(line for line in out.splitlines() if "agent_failure" in line)
    assert row.startswith("4 ")
    assert reason["message"] in row
    example = row.split()[-1]
    assert f"rollserve show {example} --log" in out
    code, log, _ = await rollserve("show", example, "--log", "--url", shared_server.url)
    assert code == 0
    assert log.count("Traceback") == 1, log
    assert "rollserve/rollouts" not in log


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_run_that_is_ended_elsewhere_ends_the_wait(
    shared_server: Server, tmp_path: Path, how: str
) -> None:
    at = ("--url", shared_server.url)
    async with shared_server.client() as client:
        await add_lonely(client)
        async with submitting(write_tasks(tmp_path), "--policy", "lonely", *at) as waiting:
            await waiting.until("has no backend")
            (run,) = (await client.runs(state=RunState.OPEN)).items
            (rollout,) = [each async for each in client.rollouts(run_id=run.id)]
            ended = {"cancel": ("cancel", rollout.group_id), "close": ("run", "close", run.id)}[how]
            assert (await rollserve(*ended, *at))[0] == 0
            code, out = await waiting.end()
    assert code == SOME_CANCELLED
    assert "1 cancelled" in out
    assert "Traceback" not in waiting.said


@pytest.fixture
def heard_hangup() -> Iterator[None]:
    """Also where the tests themselves were started to ignore it."""
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, kept)


@pytest.mark.usefixtures("heard_hangup")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_it_leaves_without_noise(shared_server: Server, tmp_path: Path, sent: signal.Signals) -> None:
    async with shared_server.client() as client:
        await add_lonely(client)
        async with submitting(
            write_tasks(tmp_path), "--policy", "lonely", "--url", shared_server.url
        ) as waiting:
            await waiting.until("has no backend")
            waiting.process.send_signal(sent)
            code, _ = await waiting.end()
        (run,) = (await client.runs(state=RunState.OPEN)).items
    assert code == 130
    assert f"run {run.id} goes on: `rollserve status {run.id}` follows it" in waiting.said
    for noise in ("Traceback", "Task", "asyncio", "Error"):
        assert noise not in waiting.said


async def test_a_server_that_is_started_again_does_not_end_the_wait(
    make_server: Callable[..., Server], backend_url: str, tmp_path: Path
) -> None:
    server = make_server()
    await server.start()
    async with server.client() as client:
        await add_lonely(client)
        async with submitting(write_tasks(tmp_path), "--policy", "lonely", "--url", server.url) as waiting:
            await waiting.until("has no backend")
            server.kill()
            await waiting.until("trying again")
            await server.start()
            await client.register_backend("lonely", RegisterBackend(url=backend_url, kind=BackendKind.VLLM))
            code, out = await waiting.end()
    assert code == 0, waiting.said
    assert "1 graded" in out
