"""The worker's end of the local executor: join the server, serve it, and go when it goes.

A worker must not outlive its server. Three things see to that: the end of the connection, a signal
from the kernel at the parent's death, and a thread that looks at the parent and ends the process the
hard way when the event loop could not.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, BinaryIO, Protocol

import msgspec

from rollserve import stopping
from rollserve.errors import InfrastructureFailure
from rollserve.executor.base import AttemptEnded, BackendReport, FromWorker, RegradingEnded, ToWorker
from rollserve.executor.channel import MAX_UNSENT_BYTES, Channel, Join, Launch, decode, to_worker_decoder

_PR_SET_PDEATHSIG = 1
_CLEAN_UP_WITHIN_S = 10.0
_FAREWELL_WITHIN_S = 2.0
_LOOK_EVERY_S = 1.0
_HARD_EXIT = 70


class WorkerSide(Protocol):
    """What serves: ``rollouts.worker.Worker``."""

    @property
    def shutdown(self) -> asyncio.Future[float]: ...
    async def start(self) -> None: ...
    def connect(self, send: Callable[[FromWorker], bool]) -> None: ...
    def disconnect(self) -> None: ...
    def handle(self, message: ToWorker) -> None: ...
    async def stop(self, grace_s: float) -> None: ...


def read_launch(source: BinaryIO | None = None) -> Launch:
    """From standard input; the very first thing a worker does. Raises ``InfrastructureFailure``."""
    line = (source or sys.stdin.buffer).readline(65536)
    try:
        return msgspec.json.decode(line, type=Launch)
    except msgspec.MsgspecError as error:
        raise InfrastructureFailure(
            "no launch data on standard input: workers are started by a server",
            operation="worker.start",
        ) from error


def follow_parent(launch: Launch, exit_within_s: float = _CLEAN_UP_WITHIN_S + 5.0) -> None:
    """From now on this process does not outlive the server: it gets a SIGTERM at its death, and is
    ended ``exit_within_s`` later whatever it does. Call from the main thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launch.server_pid:
        os._exit(_HARD_EXIT)
    looking = threading.Thread(
        target=_end_with, args=(launch.server_pid, exit_within_s), name="follow-parent", daemon=True
    )
    looking.start()


def _end_with(server_pid: int, exit_within_s: float) -> None:
    never = threading.Event()
    while os.getppid() == server_pid:
        never.wait(_LOOK_EVERY_S)
    never.wait(exit_within_s)
    os._exit(_HARD_EXIT)


async def serve(launch: Launch, worker: WorkerSide) -> None:
    """Join the server and serve until it asks for an end, is gone, or a signal asks for it.
    Returns when the worker's attempts have ended or been cleaned up. Raises ``InfrastructureFailure``
    when the server can't be joined, ``TimeoutError`` when the cleaning up takes too long."""
    async with _joined(launch) as channel, _signalled() as signalled:
        await worker.start()
        worker.connect(_sender(channel))
        listening = asyncio.create_task(_listen(channel, worker), name="channel")
        try:
            ends: list[asyncio.Future[Any]] = [listening, worker.shutdown, signalled]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            server_gone = listening.done()
            grace_s = worker.shutdown.result() if worker.shutdown.done() and not server_gone else 0.0
            if server_gone:
                worker.disconnect()
            async with asyncio.timeout(grace_s + _CLEAN_UP_WITHIN_S):
                await worker.stop(grace_s)
        finally:
            worker.disconnect()
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


@asynccontextmanager
async def _joined(launch: Launch) -> AsyncIterator[Channel]:
    try:
        reader, writer = await asyncio.open_unix_connection(launch.socket)
    except OSError as error:
        raise InfrastructureFailure(
            f"the server can't be reached at {launch.socket}: {error}", operation="worker.join"
        ) from error
    channel = Channel(reader, writer)
    try:
        channel.write(Join(worker_id=launch.worker_id, secret=launch.secret))
        yield channel
        with suppress(TimeoutError):  # a server that does not read gets no last words
            async with asyncio.timeout(_FAREWELL_WITHIN_S):
                await channel.close()
    finally:
        channel.abort()


@asynccontextmanager
async def _signalled() -> AsyncIterator[asyncio.Future[None]]:
    """A future that a SIGINT, SIGTERM or SIGHUP resolves."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not came.done():
            came.set_result(None)

    numbers = [signal.SIGINT, *stopping.asked_by()]
    for number in numbers:
        loop.add_signal_handler(number, note)
    try:
        yield came
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _sender(channel: Channel) -> Callable[[FromWorker], bool]:
    """While the server is slow to read, what it can do without is not sent: only ends are, and what is
    told once (a backend that failed or came back)."""

    def send(message: FromWorker) -> bool:
        told_once = isinstance(message, (AttemptEnded, BackendReport, RegradingEnded))
        if channel.unsent_bytes > MAX_UNSENT_BYTES // 4 and not told_once:
            return False
        return channel.write(message)

    return send


async def _listen(channel: Channel, worker: WorkerSide) -> None:
    decoder = to_worker_decoder()
    while (frame := await channel.read()) is not None:
        worker.handle(decode(decoder, frame))
        await asyncio.sleep(0)  # a burst of messages must not hold up what runs
