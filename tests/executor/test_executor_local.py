"""The local executor with real worker processes, killed and cut off in every way."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rollserve.errors import InfrastructureFailure
from rollserve.executor.base import (
    AttemptEnded,
    CancelAttempt,
    StageChanged,
    WorkerHello,
    WorkerLost,
)
from rollserve.executor.channel import Channel, Join
from rollserve.executor.local import LocalExecutor, Respawn
from rollserve.executor.process import Patience
from rollserve.testing.attempt_bench import AttemptBench
from rollserve.testing.executor_conformance import ExecutorConformance, ExecutorSubject, listening
from rollserve.testing.worker_process import COMMAND

M = TypeVar("M")
QUICK = Respawn(first_s=0.01, most_s=0.05)
NEVER = Respawn(first_s=600, most_s=600)
HASTY = Patience(follow_s=0.5, after_grace_s=0.5, after_term_s=0.2)


Open = Callable[..., Any]


@pytest.fixture
def office(socket_dir: Path, tmp_path: Path, child_env: dict[str, str]) -> Open:
    @asynccontextmanager
    async def open_office(**options: Any) -> AsyncIterator[ExecutorSubject]:
        settings = {"count": 1, "command": COMMAND, "respawn": QUICK, **options}
        executor = LocalExecutor(socket_dir=socket_dir, log_dir=tmp_path / "logs", env=child_env, **settings)
        async with listening(executor) as subject:
            yield subject

    return open_office


def gone(pid: int) -> bool:
    """The process has ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rsplit(")", 1)[1].split()[0] == "Z"


async def until_gone(pid: int) -> None:
    """The end of a process that is not ours to wait for."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), 30)
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def script(tmp_path: Path, body: str) -> list[str]:
    """A worker of a few lines: it has read its launch, and connected ``sock``."""
    path = tmp_path / "worker.py"
    path.write_text(
        "import os, socket, sys, time, msgspec\n"
        "launch = msgspec.json.decode(sys.stdin.readline())\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(launch['socket'])\n"
        "def frame(data): sock.sendall(len(data).to_bytes(4, 'big') + data)\n"
        "def say(**message): frame(msgspec.msgpack.encode(message))\n"
        "def join(): say(worker_id=launch['worker_id'], secret=launch['secret'])\n"
        "def hello(): say(type='WorkerHello', worker_id=launch['worker_id'], pid=os.getpid(), slots={},\n"
        "                 capacity=1, runtimes=[], gateway_url='')\n" + body
    )
    return [sys.executable, str(path)]


class TestConformance(ExecutorConformance):
    @pytest.fixture
    async def subject(self, office: Open) -> AsyncIterator[ExecutorSubject]:
        async with office(count=2) as subject:
            yield subject


async def test_a_lost_worker_is_gone_and_said_how(office: Open) -> None:
    async with office() as server:
        _, hello = await server.nth(WorkerHello)
        os.kill(hello.pid, signal.SIGKILL)
        _, lost = await server.nth(WorkerLost)
        assert "killed by SIGKILL" in lost.detail
        assert gone(hello.pid)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
async def test_a_worker_that_is_terminated_cleans_up_and_leaves_in_order(
    office: Open, sent: signal.Signals
) -> None:
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whether or not these tests ignore it
    async with office() as server:
        name, hello = await server.nth(WorkerHello)
        server.executor.send(name, AttemptBench.start_message("a", agent="hang"))
        await server.nth(StageChanged)
        os.kill(hello.pid, sent)
        _, lost = await server.nth(WorkerLost)
        assert "exit code 0" in lost.detail
        assert server.all(AttemptEnded) == []
    signal.signal(signal.SIGHUP, kept)


async def test_what_was_said_before_the_death_is_heard(office: Open, tmp_path: Path) -> None:
    body = (
        "join(); hello()\n"
        "for n in range(500): say(type='StageChanged', attempt_id=str(n), stage='run', at=0.0)\n"
        "sys.exit('that was it')\n"
    )
    async with office(command=script(tmp_path, body), respawn=NEVER) as server:
        _, lost = await server.nth(WorkerLost)
        assert len(server.heard) == 502
        assert "that was it" in lost.detail


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param("join(); hello(); frame(b'garbage'); time.sleep(60)", "no message", id="garbage"),
        pytest.param(
            "join(); hello(); sock.sendall(b'\\xff' * 4); time.sleep(60)", "a frame of", id="oversized"
        ),
        pytest.param("join(); hello(); sock.close(); time.sleep(60)", "closed its connection", id="closed"),
    ],
)
async def test_a_worker_that_breaks_the_channel_is_lost_and_killed(
    office: Open, tmp_path: Path, body: str, words: str
) -> None:
    command = script(tmp_path, body)
    async with office(command=command, respawn=NEVER, patience=HASTY) as server:
        _, lost = await server.nth(WorkerLost)
        assert words in lost.detail
        assert "killed by the server" in lost.detail


async def test_a_worker_that_does_not_read_is_lost(office: Open, tmp_path: Path) -> None:
    command = script(tmp_path, "join(); hello(); time.sleep(60)")
    respawn = Respawn(first_s=60, most_s=60)
    async with office(command=command, respawn=respawn, max_unsent_bytes=1 << 20) as server:
        name, _ = await server.nth(WorkerHello)
        sent = 0
        while server.executor.send(name, CancelAttempt(attempt_id="a", reason="x" * 10_000)):
            sent += 1
            assert sent < 10_000
        _, lost = await server.nth(WorkerLost)
        assert "does not read" in lost.detail


@pytest.mark.parametrize(
    "join",
    [
        pytest.param("say(worker_id=launch['worker_id'], secret='guess')", id="wrong"),
        pytest.param("say(worker_id='other', secret=launch['secret'])", id="another"),
        pytest.param("frame(b'')", id="empty"),
        pytest.param("sock.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')", id="http"),
    ],
)
async def test_a_wrong_secret_gets_no_further(
    socket_dir: Path, tmp_path: Path, child_env: dict[str, str], join: str
) -> None:
    body = f"{join}\nassert sock.recv(1) == b'', 'answered'\nsys.exit('refused')\n"
    executor = LocalExecutor(
        count=1,
        command=script(tmp_path, body),
        socket_dir=socket_dir,
        log_dir=tmp_path / "logs",
        env=child_env,
        respawn=QUICK,
    )
    with pytest.raises(InfrastructureFailure, match="refused"):
        await executor.start()


async def test_a_stranger_at_the_socket_disturbs_nobody(office: Open, socket_dir: Path) -> None:
    async with office() as server:
        name, _ = await server.nth(WorkerHello)
        (path,) = await asyncio.to_thread(lambda: list(socket_dir.glob("*.sock")))
        channel = Channel(*await asyncio.open_unix_connection(path))
        channel.write(Join(worker_id=name, secret="guess"))
        assert await asyncio.wait_for(channel.read(), 20) is None
        await channel.close()
        server.executor.send(name, AttemptBench.start_message("a"))
        await server.nth(AttemptEnded)


async def test_a_worker_that_can_not_start_says_why(
    socket_dir: Path, tmp_path: Path, child_env: dict[str, str]
) -> None:
    executor = LocalExecutor(
        count=2,
        command=[sys.executable, "-c", "raise SystemExit('no tokenizer here')"],
        socket_dir=socket_dir,
        log_dir=tmp_path / "logs",
        env=child_env,
        respawn=QUICK,
    )
    with pytest.raises(InfrastructureFailure, match="no tokenizer here"):
        await executor.start()
    assert os.listdir(socket_dir) == []


async def test_a_command_that_does_not_exist(socket_dir: Path, tmp_path: Path) -> None:
    executor = LocalExecutor(
        count=1, command=["/no/such/thing"], socket_dir=socket_dir, log_dir=tmp_path, respawn=QUICK
    )
    with pytest.raises(InfrastructureFailure, match="/no/such/thing"):
        await executor.start()


async def test_a_worker_that_never_says_hello(
    socket_dir: Path, tmp_path: Path, child_env: dict[str, str]
) -> None:
    executor = LocalExecutor(
        count=1,
        command=script(tmp_path, "print('thinking', flush=True); time.sleep(600)"),
        socket_dir=socket_dir,
        log_dir=tmp_path / "logs",
        env=child_env,
        patience=Patience(hello_s=1.5, after_grace_s=0.1, after_term_s=0.1),
        respawn=QUICK,
    )
    with pytest.raises(InfrastructureFailure, match="hello"):
        await executor.start()


async def test_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    executor = LocalExecutor(count=1, command=COMMAND, socket_dir=tmp_path / ("x" * 120), log_dir=tmp_path)
    with pytest.raises(InfrastructureFailure, match="too long"):
        await executor.start()


async def test_stop_ends_a_worker_whose_loop_is_stuck(office: Open) -> None:
    async with office(patience=HASTY) as server:
        name, hello = await server.nth(WorkerHello)
        server.executor.send(name, AttemptBench.start_message("a", agent="block"))
    assert gone(hello.pid)


async def test_what_workers_print_is_kept_and_kept_small(office: Open, tmp_path: Path) -> None:
    async with office(max_log_bytes=4096) as server:
        name, _ = await server.nth(WorkerHello)
        log = tmp_path / "logs" / "worker-0.log"
        server.executor.send(name, AttemptBench.start_message("a", agent="cry", instruction="x" * 9999))
        await server.nth(AttemptEnded)
        assert log.stat().st_size >= 9999
        await server.executor.trim_logs()
        assert log.stat().st_size == 0
        assert log.with_name("worker-0.log.1").stat().st_size == 4096
        server.executor.send(name, AttemptBench.start_message("b", agent="cry", instruction="again"))
        await server.nth(AttemptEnded, 2)
        assert log.read_text() == "again\n"


def test_a_crash_loop_slows_down() -> None:
    respawn = Respawn(first_s=0.2, most_s=30)
    assert [respawn.delay_s(failures) for failures in (0, 1, 2, 20, 5000)] == [0.2, 0.4, 0.8, 30, 30]


# -- the server's death
SERVER = """
import asyncio, sys
from pathlib import Path
from rollserve.executor.base import WorkerHello
from rollserve.executor.local import LocalExecutor
from rollserve.testing.attempt_bench import AttemptBench
from rollserve.testing.executor_conformance import ExecutorConformance, ExecutorSubject, listening
from rollserve.testing.worker_process import COMMAND

async def main():
    folder = Path(sys.argv[1])
    executor = LocalExecutor(count=2, command=COMMAND, socket_dir=folder, log_dir=folder / "logs")
    await executor.start()
    async for name, message in executor.reports():
        if isinstance(message, WorkerHello):
            executor.send(name, AttemptBench.start_message("a", agent=sys.argv[2]))
            print(message.pid, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("agent", ["hang", "block"])
async def test_a_server_that_is_killed_leaves_no_worker(
    socket_dir: Path, child_env: dict[str, str], agent: str
) -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(socket_dir), agent, env=child_env, stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    async with asyncio.timeout(60):
        pids = [int(await server.stdout.readline()) for _ in range(2)]
    assert not any(gone(pid) for pid in pids)
    server.kill()
    await server.wait()
    for pid in pids:
        await until_gone(pid)
