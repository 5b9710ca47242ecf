"""The zygote: a small, single-threaded process that forks code hosts.

Forking a process that has already imported everything costs milliseconds where starting an
interpreter costs hundreds. It must stay single-threaded (a lock held by another thread at the fork
would stay held for ever in the host), so it runs no user code beyond importing modules that a host
has imported before without starting a thread.

It is also where nothing gets lost: it is the subreaper of all that hosts start. When a host has
ended, its process group and whatever it had daemonised are killed; when the worker is gone (its end
of the control socket closes), everything is.
"""

from __future__ import annotations

import array
import ctypes
import gc
import io
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress

import msgspec

from rollserve.usercode.child import host_main
from rollserve.usercode.frames import (
    MAX_PACKET_BYTES,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    FromZygote,
    Preload,
    Preloaded,
    Ready,
    Release,
    ToZygote,
)
from rollserve.usercode.operations import UserCode
from rollserve.usercode.sources import Sources

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LEAVE_DEADLINE_S = 3.0


def main(control_fd: int, code_dir: str) -> None:
    """Serve the worker at the other end of ``control_fd`` until it is gone; never returns."""
    for name in [name for name in os.environ if name.startswith("ROLLSERVE_")]:
        del os.environ[name]  # the service's own settings hold keys that user code must not see
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # many hosts share the cores; and their pools are threads
    sources = Sources(code_dir)
    sources.install()
    Zygote(socket.socket(fileno=control_fd), UserCode(sources)).serve()


class Zygote:
    """``_hosts`` maps the id the worker gave to the process id; ``_ended`` those that were reported
    and wait for their release (as zombies, so that nobody else gets their process id)."""

    def __init__(self, control: socket.socket, code: UserCode) -> None:
        self._control = control
        self._code = code
        self._hosts: dict[int, int] = {}
        self._ended: set[int] = set()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to answer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        gc.disable()
        gc.collect()
        gc.freeze()
        self._tell(Ready())
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._control:
                    self._serve_control()
                else:
                    with suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._sweep()

    def _tell(self, message: FromZygote) -> None:
        try:
            self._control.send(msgspec.msgpack.encode(message))
        except OSError:
            self._leave()

    def _serve_control(self) -> None:
        fds = array.array("i")
        try:
            data, ancillary, _, _ = self._control.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(2 * 4))
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._leave()
        for _, _, payload in ancillary:
            fds.frombytes(payload)
        message = msgspec.msgpack.decode(data, type=ToZygote)
        if isinstance(message, Fork):
            self._fork(message, fds[0], fds[1])
        elif isinstance(message, Release):
            self._release(message.id)
        else:
            self._preload(message)

    def _fork(self, order: Fork, channel_fd: int, output_fd: int) -> None:
        zygote_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(ForkFailed(order.id, str(error)))
            pid = -1
        if pid == 0:
            self._become_host(order, zygote_pid, channel_fd, output_fd)
        os.close(channel_fd)
        os.close(output_fd)
        if pid > 0:
            with suppress(OSError):
                os.setpgid(pid, pid)  # in both processes: whoever comes first
            self._hosts[order.id] = pid
            self._tell(Forked(order.id, pid))

    def _become_host(self, order: Fork, zygote_pid: int, channel_fd: int, output_fd: int) -> None:
        """In the new process; never returns, whatever happens."""
        try:
            with suppress(OSError):
                os.setpgid(0, 0)
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            if os.getppid() != zygote_pid:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._control.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            _redirect(output_fd)
            _limit(order)
            gc.enable()
            host_main(socket.socket(fileno=channel_fd), self._code.operations)
        except BaseException:  # the process's edge: a traceback into the attempt's log, then out
            traceback.print_exc()
        finally:
            os._exit(1)

    def _release(self, host_id: int) -> None:
        pid = self._hosts.pop(host_id, None)
        self._ended.discard(host_id)
        if pid is not None:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _preload(self, order: Preload) -> None:
        error = ""
        try:
            self._code.prepare(order.path, order.role)
        except BaseException as caught:  # user code at import: recorded in the answer
            error = repr(caught)[:500]
        gc.collect()
        gc.freeze()
        self._tell(Preloaded(error))

    def _sweep(self) -> None:
        """Report hosts that have ended, kill what they left."""
        for host_id, pid in list(self._hosts.items()):
            if host_id in self._ended:
                continue
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                self._ended.add(host_id)
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                exited = end.si_code == os.CLD_EXITED
                self._tell(Exited(host_id, end.si_status if exited else -end.si_status))
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """A child that is no host was daemonised by a host that is gone."""
        known = set(self._hosts.values())
        for pid in _children():
            if pid not in known:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)

    def _leave(self) -> None:
        """Kill all hosts and what they started, then exit."""
        deadline = time.monotonic() + _LEAVE_DEADLINE_S
        for pid in self._hosts.values():
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        self._hosts.clear()
        self._kill_orphans()
        while time.monotonic() < deadline and _children():
            self._kill_orphans()
            time.sleep(0.005)
        os._exit(0)


def _children() -> list[int]:
    try:
        with open("/proc/thread-self/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without it: groups are killed, daemons are not found
        return []


def _redirect(output_fd: int) -> None:
    """What is printed goes to the output pipe; nothing can be read."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(null)
    os.close(output_fd)
    sys.stdout, sys.stderr = _line_stream(1), _line_stream(2)


def _line_stream(fd: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _limit(order: Fork) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if order.memory_mb is not None:
        size = order.memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    if order.cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (order.cpu_s, order.cpu_s))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # when memory runs out, a host goes before its worker
