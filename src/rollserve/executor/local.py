"""Workers as processes of this machine.

Each of ``count`` places has a supervisor that starts a process, watches it, and starts another when
it is gone, more slowly the sooner it went. A process joins over a Unix socket; its end is the end of
the process or of the connection, whichever comes first, and then both are made to be gone before
``WorkerLost`` is reported: what the server starts anew never runs beside its old self.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollserve.backoff import backoff_s
from rollserve.errors import InfrastructureFailure
from rollserve.executor.base import FromWorker, PolicyView, Shutdown, ToWorker, WorkerHello, WorkerLost
from rollserve.executor.channel import (
    MAX_UNSENT_BYTES,
    Channel,
    ChannelBroken,
    Launch,
    admit,
    decode,
    from_worker_decoder,
)
from rollserve.executor.log_file import LogFile
from rollserve.executor.process import Patience, WorkerProcess

logger = logging.getLogger(__name__)

_JOIN_WITHIN_S = 10.0
_TRIM_EVERY_S = 5.0
_MAX_REPORTS = 10_000
_MAX_PATH_BYTES = 100

Report = tuple[str, FromWorker | WorkerLost]


@dataclass(frozen=True, kw_only=True)
class Respawn:
    """A worker that lived ``healthy_s`` is replaced after ``first_s``; one that did not, each time
    twice as late, ``most_s`` at most."""

    first_s: float = 0.2
    most_s: float = 30.0
    healthy_s: float = 10.0

    def delay_s(self, failures: int) -> float:
        return backoff_s(failures + 1, self.first_s, self.most_s)


@dataclass(kw_only=True)
class _Member:
    """A worker that has a process; ``joined`` is its connection once it has proven who it is."""

    launch: Launch
    process: WorkerProcess
    joined: asyncio.Future[Channel]
    greeted: bool = False

    @property
    def channel(self) -> Channel | None:
        return self.joined.result() if self.joined.done() and not self.joined.cancelled() else None


class LocalExecutor:
    """See ``executor.base.Executor``.

    ``command`` starts a worker; it reads a ``Launch`` from its standard input (``worker_main``).
    ``socket_dir`` is a private folder with a short path; ``log_dir`` gets one log a place.
    """

    def __init__(
        self,
        *,
        count: int,
        command: Sequence[str],
        socket_dir: Path,
        log_dir: Path,
        env: Mapping[str, str] | None = None,
        max_log_bytes: int = 16 << 20,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
        respawn: Respawn | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._count = count
        self._command = list(command)
        self._socket = socket_dir / f"workers-{secrets.token_hex(4)}.sock"
        self._log_dir = log_dir
        self._env = None if env is None else dict(env)
        self._max_log_bytes = max_log_bytes
        self._max_unsent_bytes = max_unsent_bytes
        self._respawn = respawn or Respawn()
        self._patience = patience or Patience()
        self._members: dict[str, _Member] = {}
        self._views: dict[str, PolicyView] = {}
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue(_MAX_REPORTS)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_hello: asyncio.Future[None] | None = None
        self._early_deaths = 0
        self._decoder = from_worker_decoder()
        self._stopping = asyncio.Event()

    # -- the contract
    async def start(self) -> None:
        await self._listen()
        self._first_hello = asyncio.get_running_loop().create_future()
        for place in range(self._count):
            self._own(self._keep(place), f"worker-{place}")
        self._own(self._keep_logs_small(), "worker-logs")
        try:
            async with asyncio.timeout(self._patience.hello_s):
                await self._first_hello
        except TimeoutError as error:
            words = [await member.process.last_words() for member in self._members.values()]
            await self.stop(0)
            raise self._no_worker(f"none said hello within {self._patience.hello_s:g} s", *words) from error
        except InfrastructureFailure:
            await self.stop(0)
            raise

    def send(self, worker_id: str, message: ToWorker) -> bool:
        member = self._members.get(worker_id)
        channel = None if member is None else member.channel
        return channel is not None and channel.write(message)

    def broadcast(self, message: ToWorker) -> None:
        if isinstance(message, PolicyView):
            name = message.policy().spec.name
            known = self._views.get(name)
            if known is not None and known.revision > message.revision:
                return
            self._views[name] = message
        for member in self._members.values():
            if member.channel is not None:
                member.channel.write(message)

    async def reports(self) -> AsyncIterator[Report]:
        while (report := await self._reports.get()) is not None:
            yield report

    async def stop(self, grace_s: float) -> None:
        """Ask, wait, terminate, kill. ``reports`` ends once all processes are gone."""
        first = not self._stopping.is_set()
        self._stopping.set()
        self.broadcast(Shutdown(grace_s=grace_s))
        members = list(self._members.values())
        for member in members:
            if member.channel is None:  # still starting: it has nothing to hand in, and can't be asked
                member.process.kill()
        await asyncio.gather(*(member.process.end(grace_s, self._patience) for member in members))
        await self._end_tasks()
        if self._server is not None:
            self._server.close()
            await asyncio.to_thread(self._socket.unlink, missing_ok=True)
        if first:
            while self._reports.full():
                self._reports.get_nowait()
            self._reports.put_nowait(None)

    # -- one place
    async def _keep(self, place: int) -> None:
        """Keep one worker running."""
        failures = 0
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            await self._live(place)
            failures = 0 if loop.time() - began >= self._respawn.healthy_s else failures + 1
            try:
                async with asyncio.timeout(self._respawn.delay_s(failures)):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _live(self, place: int) -> None:
        """One process, from its start to its confirmed end."""
        launch = Launch(
            worker_id=f"worker-{place}-{secrets.token_hex(4)}",
            socket=str(self._socket),
            secret=secrets.token_urlsafe(32),
            server_pid=os.getpid(),
        )
        log = LogFile(self._log_dir / f"worker-{place}.log", self._max_log_bytes)
        try:
            process = await WorkerProcess.start(self._command, launch, log, self._env)
        except OSError as error:
            self._died_early(f"can't start {self._command[0]}: {error}")
            return
        joined: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        member = _Member(launch=launch, process=process, joined=joined)
        self._members[launch.worker_id] = member
        try:
            why = await self._attend(member)
        finally:
            process.kill()
            await process.wait()
            del self._members[launch.worker_id]
        detail = f"{why}; {await process.describe_end()}"
        if not self._stopping.is_set():
            logger.warning("%s is lost: %s", launch.worker_id, detail)
        if member.greeted:
            await self._report(launch.worker_id, WorkerLost(detail=detail))
        else:
            self._died_early(detail)

    async def _attend(self, member: _Member) -> str:
        """Until process or connection has ended; returns what happened. What the worker had sent by
        then has been reported."""
        exited = asyncio.create_task(member.process.wait())
        talking = asyncio.create_task(self._talk(member))
        try:
            await asyncio.wait({exited, talking}, return_when=asyncio.FIRST_COMPLETED)
            broken = talking.done() and talking.exception() is not None
            if member.channel is not None and not broken:
                # The other follows: the last frames, or an orderly exit.
                patience_s = None if self._stopping.is_set() else self._patience.follow_s
                await asyncio.wait({exited, talking}, timeout=patience_s)
            if not talking.done():
                return "its process ended"
            error = talking.exception()
            return str(error) if error is not None else "it closed its connection"
        finally:
            channel = member.channel
            if channel is not None:
                channel.abort()
            for task in (exited, talking):
                task.cancel()
            await asyncio.gather(exited, talking, return_exceptions=True)

    async def _talk(self, member: _Member) -> None:
        """Report what the worker says until the connection's end. Raises ``ChannelBroken``."""
        try:
            async with asyncio.timeout(self._patience.hello_s):
                channel = await asyncio.shield(member.joined)
                await self._next(member, channel)
        except TimeoutError as error:
            raise ChannelBroken(f"no hello within {self._patience.hello_s:g} s") from error
        while await self._next(member, channel):
            pass
        if channel.overflowed:
            raise ChannelBroken("it does not read what it is sent")

    async def _next(self, member: _Member, channel: Channel) -> bool:
        try:
            async with asyncio.timeout(self._patience.silent_s):
                frame = await channel.read()
        except TimeoutError as error:
            raise ChannelBroken(f"it said nothing for {self._patience.silent_s:g} s") from error
        if frame is None:
            return False
        message = decode(self._decoder, frame)
        if isinstance(message, WorkerHello):
            member.greeted = True
            if self._first_hello is not None and not self._first_hello.done():
                self._first_hello.set_result(None)
        elif not member.greeted:
            raise ChannelBroken("it spoke before it said hello")
        await self._report(member.launch.worker_id, message)
        return True

    async def _report(self, worker_id: str, message: FromWorker | WorkerLost) -> None:
        """Waits while the queue is full: then workers are read no faster than they are heard."""
        await self._reports.put((worker_id, message))

    # -- around
    async def _listen(self) -> None:
        if len(os.fsencode(self._socket)) > _MAX_PATH_BYTES:
            raise InfrastructureFailure(
                f"the path of the workers' socket is too long: {self._socket}",
                operation="executor.start",
                hint="choose a data_dir with a shorter path",
            )
        await asyncio.to_thread(self._socket.parent.mkdir, mode=0o700, parents=True, exist_ok=True)
        self._server = await asyncio.start_unix_server(self._on_connection, self._socket)
        await asyncio.to_thread(self._socket.chmod, 0o600)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer, max_unsent_bytes=self._max_unsent_bytes)
        expected = {name: member.launch.secret for name, member in self._members.items()}
        try:
            async with asyncio.timeout(_JOIN_WITHIN_S):
                worker_id = await admit(channel, expected)
        except TimeoutError:
            worker_id = None
        member = None if worker_id is None else self._members.get(worker_id)
        if member is None or member.joined.done():
            logger.warning("refused a connection that is no worker's")
            channel.abort()
            return
        for view in self._views.values():
            channel.write(view)
        member.joined.set_result(channel)

    def _died_early(self, detail: str) -> None:
        """Before its hello. When that has happened once a place, there is no use in waiting on."""
        first = self._first_hello
        if first is None or first.done():
            return
        self._early_deaths += 1
        if self._early_deaths >= self._count:
            first.set_exception(self._no_worker(detail))

    def _no_worker(self, *words: str) -> InfrastructureFailure:
        said = "; ".join(filter(None, words))
        return InfrastructureFailure(f"no worker came up: {said}", operation="executor.start")

    async def trim_logs(self) -> None:
        """Cut the logs that are over their bound."""
        for member in list(self._members.values()):
            try:
                await member.process.trim_log()
            except OSError:  # a log that can't be cut is no reason to lose a worker
                logger.exception("the log of %s can't be cut", member.launch.worker_id)

    async def _keep_logs_small(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_EVERY_S)
            await self.trim_logs()

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)

    async def _end_tasks(self) -> None:
        """The supervisors end by themselves once their processes are gone, unless nobody hears their
        last reports."""
        keepers = [task for task in self._tasks if task.get_name() != "worker-logs"]
        if keepers:
            await asyncio.wait(keepers, timeout=self._patience.follow_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
