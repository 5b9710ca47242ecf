"""The inside of a code host: the channel to the worker, and the loop that runs what it asks for.

User code runs on the main thread (an event loop for coroutines, plainly otherwise), so that signals,
``signal.alarm`` and the like work for it. A second thread reads the channel: it hands over answers,
passes a cancel on, and ends the process when the worker's end is gone, whatever the main thread does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import importlib
import itertools
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import msgspec

from rollserve.errors import RollserveError
from rollserve.usercode.base import CodeFault, Ending
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

T = TypeVar("T")

TRACE_LINES = 20
TRACE_CHARS = 4000
NOTE_CHARS = 4096
NOTES_MAX = 10_000
WORKER_GONE = 70
CANCELLED = 71


class Channel:
    """Frames to and from the worker; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._pending: dict[int, concurrent.futures.Future[bytes]] = {}
        self._notes = 0

    def send(self, frame: Frame) -> None:
        data = pack(frame)
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(f"{len(data)} bytes are more than the {MAX_FRAME_BYTES} a message can have")
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError:
            os._exit(WORKER_GONE)

    def receive(self) -> Frame:
        try:
            size = LENGTH.unpack(self._exactly(LENGTH.size))[0]
            return msgspec.msgpack.decode(self._exactly(size), type=Frame)
        except OSError:
            os._exit(WORKER_GONE)

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._sock.recv_into(view[done:])
            if count == 0:
                os._exit(WORKER_GONE)
            done += count
        return bytes(data)

    def note(self, line: str) -> None:
        """A line for the attempt's log; past ``NOTES_MAX`` they are dropped here."""
        self._notes += 1
        if self._notes <= NOTES_MAX:
            self.send(Note(str(line)[:NOTE_CHARS]))

    def request(self, op: str, params: msgspec.Struct) -> tuple[int, concurrent.futures.Future[bytes]]:
        """Ask the worker; the future ends with the encoded answer or the error it stands for."""
        call_id = next(self._ids)
        future: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        self._pending[call_id] = future
        try:
            self.send(Call(call_id, op, msgspec.msgpack.encode(params)))
        except BaseException:
            del self._pending[call_id]
            raise
        return call_id, future

    def ask(self, op: str, params: msgspec.Struct, returns: type[T]) -> T:
        """``request`` for plain functions: wait for the answer on the main thread."""
        return msgspec.msgpack.decode(self.request(op, params)[1].result(), type=returns)

    async def ask_async(self, op: str, params: msgspec.Struct, returns: type[T]) -> T:
        """``request`` for coroutines; cancelling it cancels the worker's side."""
        call_id, future = self.request(op, params)
        try:
            value = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.send(Cancel(call_id))
            raise
        return msgspec.msgpack.decode(value, type=returns)

    def answer(self, frame: Result | Fault) -> None:
        """An answer came in (on the reading thread)."""
        future = self._pending.pop(frame.id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(frame, Result):
            future.set_result(frame.value)
        else:
            future.set_exception(to_error(frame) or RuntimeError(frame.message))


Operations = Mapping[str, Callable[["Host", bytes], object]]
"""What a host can be asked to do: encoded parameters in, a msgpack-encodable value out."""


class Host:
    """Runs one call at a time on the main thread."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._runner = asyncio.Runner()  # makes its loop at the first coroutine; ends with the process
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: int | None = None
        self._task: asyncio.Task[Any] | None = None

    def read_for_ever(self) -> NoReturn:
        while True:
            frame = self.channel.receive()
            if isinstance(frame, Call):
                self._calls.put(frame)
            elif isinstance(frame, Cancel):
                self._cancel(frame.id)
            elif isinstance(frame, Result | Fault):
                self.channel.answer(frame)

    def serve_for_ever(self, operations: Operations) -> NoReturn:
        while True:
            call = self._calls.get()
            with self._lock:
                self._current = call.id
            answer = self._run(call, operations[call.op])
            with self._lock:
                self._current = None
            _flush()
            self.channel.send(answer)

    def _run(self, call: Call, operation: Callable[[Host, bytes], object]) -> Result | Fault:
        """The edge to user code: everything it can raise becomes an answer."""
        try:
            value = msgspec.msgpack.encode(operation(self, call.params))
            if len(value) > MAX_FRAME_BYTES // 2:
                raise ValueError(f"a result of {len(value)} bytes is too large")
            return Result(call.id, value)
        except CodeFault as error:
            return Fault(call.id, error.ending.value, error.message, error.trace)
        except RollserveError as error:
            return to_fault(call.id, error)
        except SystemExit as error:
            return Fault(call.id, Ending.EXITED.value, f"called sys.exit({error.code!r})", tail(error))
        except BaseException as error:
            return Fault(call.id, Ending.RAISED.value, headline(error), tail(error))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the user's to its end; a cancel of the call cancels it."""

        async def watched() -> T:
            with self._lock:
                self._task = asyncio.current_task()
            try:
                return await coroutine
            finally:
                with self._lock:
                    self._task = None

        return self._runner.run(watched())

    def _cancel(self, call_id: int) -> None:
        """Ask a coroutine to stop. A plain function can't be asked: the process ends."""
        with self._lock:
            if self._current != call_id:
                return
            if self._task is None:
                os._exit(CANCELLED)
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)


def host_main(sock: socket.socket, operations: Operations) -> NoReturn:
    """The main function of a host; ``sock`` is its end of the channel."""
    faulthandler.enable(file=2, all_threads=False)
    _reseed()
    host = Host(Channel(sock))
    threading.Thread(target=host.read_for_ever, name="rollserve-channel", daemon=True).start()
    host.serve_for_ever(operations)


def headline(error: BaseException) -> str:
    """``TypeError: …``, bounded, also when the error can't be printed."""
    try:
        text = traceback.format_exception_only(error)[-1].strip()
    except Exception:  # a __str__ of the user's that raises: its class is what can be said
        text = type(error).__name__
    return text[:1000]


def tail(error: BaseException) -> str:
    """The last lines of the traceback, the frames at its start that are not the user's left out."""
    try:
        lines = traceback.format_exception(type(error), error, _user_frames(error.__traceback__))
    except Exception as broken:  # the same: say why there is no traceback
        return f"(no traceback: {type(broken).__name__} while formatting it)"
    text = "\n".join("".join(lines).rstrip().splitlines()[-TRACE_LINES:])
    return text[-TRACE_CHARS:]


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    others = (os.path.dirname(__file__), os.path.dirname(importlib.__file__), "<frozen")
    current = trace
    while current is not None:
        name = current.tb_frame.f_code.co_filename
        if not name.startswith(others) and f"{os.sep}asyncio{os.sep}" not in name:
            return current
        current = current.tb_next
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by user code
            continue


def _reseed() -> None:
    """Forks share the state of random generators that were imported before; ``random`` looks after
    itself, these don't. Without it all attempts of a group would draw the same numbers."""
    seed = int.from_bytes(os.urandom(4), "little")
    for name, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        module = sys.modules.get(name)
        if module is not None:
            getattr(module, function)(seed)
