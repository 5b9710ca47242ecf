"""The worker's side of one code host: calls into it, its requests, its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import Any, TypeVar

import msgspec

from rollserve.errors import InfrastructureFailure, RollserveError
from rollserve.usercode.base import CodeFault, Ending, Handlers, LogLine
from rollserve.usercode.child import CANCELLED
from rollserve.usercode.frames import (
    LENGTH,
    MAX_FRAME_BYTES,
    Call,
    Cancel,
    Fault,
    Frame,
    Note,
    Result,
    pack,
    to_error,
    to_fault,
)
from rollserve.usercode.output import BoundedLog, Output

T = TypeVar("T")

REQUESTS_AT_ONCE = 64
KILL_DEADLINE_S = 10.0
LAST_FRAMES_S = 0.5
CRASHES = frozenset({Ending.RAISED.value, Ending.EXITED.value})


class Host:
    """A host process. ``started`` ends with its process id, ``ended`` with its exit status (minus the
    signal, as ``subprocess`` has it), or None when the zygote is gone and nobody knows."""

    def __init__(
        self,
        host_id: int,
        *,
        handlers: Handlers,
        log: LogLine,
        output_fd: int,
        log_limit_chars: int,
        cancel_grace_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.id = host_id
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self._handlers = handlers
        self._log = BoundedLog(log, log_limit_chars)
        self._output = Output(output_fd, self._log)
        self._grace_s = cancel_grace_s
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._fault: CodeFault | None = None
        self._doomed = False

    # -- life, driven by ``hosts``

    def attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader), name=f"code-host-{self.id}")

    def on_forked(self, pid: int) -> None:
        if not self.started.done():
            self.started.set_result(pid)
        if self._doomed:
            self.kill()

    def on_ended(self, status: int | None) -> None:
        """The process is gone. Waiters are told once the frames it still sent are read."""
        if not self.ended.done():
            self.ended.set_result(status)

    def on_fork_failed(self, message: str) -> None:
        if not self.started.done():
            self.started.set_exception(InfrastructureFailure(message, operation="code_host.start"))
            self.started.exception()  # a waiter may be gone: not an error of its own
        self.on_ended(None)

    @property
    def alive(self) -> bool:
        return not (self._doomed or self.ended.done())

    def kill(self, because: CodeFault | None = None) -> None:
        """SIGKILL to the process and its group. Its process id is its own until ``hosts`` releases
        it, so this can't hit another. Calls that are still to end fail with the first ``because``."""
        self._doomed = True
        self._fault = self._fault or because
        if self.ended.done() or not self.started.done() or self.started.exception() is not None:
            return
        pid = self.started.result()
        for send in (os.killpg, os.kill):
            try:
                send(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    async def close(self) -> None:
        """Kill, and return when the process is confirmed gone and what served it has stopped."""
        self.kill()
        try:
            async with asyncio.timeout(KILL_DEADLINE_S):
                await asyncio.shield(self.ended)
        except TimeoutError:
            self._log.line(f"[code host {self.id} was killed and is not gone after {KILL_DEADLINE_S:g} s]")
        finally:
            await self._release()

    async def _release(self) -> None:
        tasks = [*self._requests.values(), *([self._reading] if self._reading else [])]
        for task in tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        self._output.close()
        self._fail_calls()
        if tasks:
            await asyncio.wait(tasks, timeout=KILL_DEADLINE_S)

    # -- calls into the host

    async def call(self, op: str, params: msgspec.Struct, returns: type[T], *, timeout_s: float | None) -> T:
        call_id = next(self._ids)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(Call(call_id, op, msgspec.msgpack.encode(params)))
            await self._settled(future, timeout_s)
            if not future.done() and self.ended.done():
                await self._read_last_frames()
        except asyncio.CancelledError:
            await self._stop(call_id, future)
            raise
        finally:
            self._calls.pop(call_id, None)
        if not future.done():
            await self._stop(call_id, future)
            message = f"still running after {timeout_s:g} s"
            raise CodeFault(message, ending=Ending.TIMED_OUT, trace=self._output.tail)
        return self._decode(future.result(), returns)

    def _decode(self, value: bytes, returns: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(value, type=returns)
        except msgspec.MsgspecError as error:
            self.kill()
            raise CodeFault(f"unreadable result: {error}", ending=Ending.PROTOCOL) from error

    async def _read_last_frames(self) -> None:
        """The process has ended: take what it sent before, then fail what was not answered."""
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=LAST_FRAMES_S)
        self._output.close()
        self._fail_calls()

    def _fail_calls(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._fault or self._obituary())
                future.exception()

    def _obituary(self) -> RollserveError:
        status = self.ended.result() if self.ended.done() else None
        if status is None:
            return InfrastructureFailure("the code host's process was lost", operation="code_host.run")
        if status >= 0:
            what = "was cancelled" if status == CANCELLED and self._doomed else f"exited with status {status}"
            return CodeFault(what, ending=Ending.EXITED, trace=self._output.tail)
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return CodeFault(f"killed by {name}", ending=Ending.KILLED, trace=self._output.tail)

    async def _stop(self, call_id: int, future: asyncio.Future[bytes]) -> None:
        """Cancel, first nicely; the process is killed when that does not help within the grace."""
        try:
            self._send(Cancel(call_id))
            await self._settled(future, self._grace_s)
        finally:
            if future.done():
                future.exception()  # the cancelled call's answer: nobody waits for it any more
            else:
                self.kill()

    async def _settled(self, future: asyncio.Future[bytes], timeout_s: float | None) -> None:
        """Wait for the answer, the end of the process, or the time-out."""
        either: set[asyncio.Future[Any]] = {future, self.ended}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    def _send(self, frame: Frame) -> None:
        if self._writer is not None and not self.ended.done():
            self._writer.write(pack(frame))

    # -- what the host sends

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
                if size > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {size} bytes")
                await self._serve(msgspec.msgpack.decode(await reader.readexactly(size), type=Frame))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # its end is told by ``ended``
        except (msgspec.MsgspecError, ValueError) as error:
            self.kill(because=CodeFault(f"wrote on its channel: {error}", ending=Ending.PROTOCOL))

    async def _serve(self, frame: Frame) -> None:
        if isinstance(frame, Call):
            await self._room.acquire()
            self._requests[frame.id] = asyncio.create_task(self._answer(frame))
        elif isinstance(frame, Note):
            self._log.line(frame.line)
        elif isinstance(frame, Cancel):
            if (task := self._requests.get(frame.id)) is not None:
                task.cancel()
        else:
            self._settle(frame)

    def _settle(self, frame: Result | Fault) -> None:
        future = self._calls.get(frame.id)
        if future is None or future.done():
            return
        if isinstance(frame, Result):
            future.set_result(frame.value)
            return
        error = to_error(frame)
        if error is None:
            ending = Ending(frame.code) if frame.code in CRASHES else Ending.RAISED
            error = CodeFault(frame.message, ending=ending, trace=frame.trace)
        future.set_exception(error)

    async def _answer(self, call: Call) -> None:
        """Serve one request of the host. The edge between user code and the worker: what a handler
        raises goes back to the user's code, and is logged when it is none of ours."""
        answer: Result | Fault
        try:
            handler = self._handlers.get(call.op)
            if handler is None:
                raise LookupError(f"nothing here answers {call.op!r}")
            answer = Result(call.id, msgspec.msgpack.encode(await handler(call.params)))
        except asyncio.CancelledError:
            answer = Fault(call.id, "cancelled", "the request was cancelled")
        except RollserveError as error:
            answer = to_fault(call.id, error)
        except Exception as error:
            self._log.line(f"[answering {call.op!r} failed: {error!r}]")
            answer = Fault(call.id, "internal", f"{type(error).__name__}: {error}")
        finally:
            self._requests.pop(call.id, None)
            self._room.release()
        self._send(answer)
