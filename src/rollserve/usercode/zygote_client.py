"""The worker's side of the zygote: starting it, its control socket, its end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

import rollserve
from rollserve.errors import InfrastructureFailure
from rollserve.usercode.base import CodeInfo, Role
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
from rollserve.usercode.host import Host

BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from rollserve.usercode.zygote import main; main(int(sys.argv[2]), sys.argv[3])"
)
STOP_S = 5.0
RETRY_S = 0.005


class ZygoteClient:
    """One zygote process and the hosts forked from it, by id."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.hosts: dict[int, Host] = {}
        self._fds: dict[int, tuple[socket.socket, int]] = {}
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._preloaded: asyncio.Future[str] | None = None
        self._held: set[str] = set()
        self.alive = True
        self._loop.add_reader(control.fileno(), self._readable)

    @classmethod
    async def start(cls, code_dir: str | None, *, timeout_s: float) -> ZygoteClient:
        """Raises ``InfrastructureFailure`` when it does not come up in time."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        root = str(Path(rollserve.__file__).parents[1])
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-c", BOOT, root, str(theirs.fileno()), code_dir or ""),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        client = cls(process, ours)
        try:
            async with asyncio.timeout(timeout_s):
                await client._ready
        except TimeoutError:
            await client.close()
            message = f"the code hosts' zygote did not start within {timeout_s:g} s"
            raise InfrastructureFailure(message, operation="code_host.zygote") from None
        except BaseException:
            await client.close()
            raise
        return client

    def adopt(self, host: Host, channel: socket.socket, output_fd: int) -> None:
        """Take over the host's two descriptors until it is forked."""
        if not self.alive:
            channel.close()
            os.close(output_fd)
            host.on_ended(None)
            return
        self.hosts[host.id] = host
        self._fds[host.id] = (channel, output_fd)

    async def fork(self, host: Host, *, memory_mb: int | None, cpu_s: int | None) -> None:
        """Order the fork; ``host.started`` ends when it is done."""
        try:
            await self._send(Fork(host.id, memory_mb, cpu_s), host.id)
        except BaseException as error:
            self._drop(host.id)
            host.on_fork_failed(f"the fork could not be ordered: {error!r}")
            raise
        self._close_fds(host.id)

    async def preload(self, path: str, role: Role, *, timeout_s: float) -> bool:
        """Let hosts to come find ``path`` imported. One at a time. Returns whether they do. Raises
        ``TimeoutError``."""
        self._preloaded = self._loop.create_future()
        async with asyncio.timeout(timeout_s):
            await self._send(Preload(path, role))
            return not await self._preloaded

    def hold(self, info: CodeInfo) -> None:
        """It was found to have the module imported as it was described."""
        self._held.add(_module(info))

    def holds(self, info: CodeInfo) -> bool:
        """Whether hosts have ``info`` as it was described. Otherwise they import what is on the disk."""
        return _module(info) in self._held

    async def close(self) -> None:
        """Let the zygote kill its hosts and go; returns when it has."""
        self._lost()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _send(self, message: ToZygote, host_id: int | None = None) -> None:
        data = msgspec.msgpack.encode(message)
        while True:
            if not self.alive:
                raise InfrastructureFailure("the zygote is gone", operation="code_host.start")
            try:
                if host_id is None:
                    self._control.send(data)
                else:
                    channel, output_fd = self._fds[host_id]
                    socket.send_fds(self._control, [data], [channel.fileno(), output_fd])
                return
            except BlockingIOError:  # its queue is full: it is importing, or there are very many
                await asyncio.sleep(RETRY_S)
            except OSError:
                self._lost()

    def _readable(self) -> None:
        while self.alive:
            try:
                data = self._control.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            self._serve(msgspec.msgpack.decode(data, type=FromZygote))

    def _serve(self, message: FromZygote) -> None:
        match message:
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(None)
            case Preloaded(error=error):
                if self._preloaded is not None and not self._preloaded.done():
                    self._preloaded.set_result(error)
            case Forked(id=host_id, pid=pid):
                if (host := self.hosts.get(host_id)) is not None:
                    host.on_forked(pid)
            case ForkFailed(id=host_id, message=text):
                if (host := self.hosts.pop(host_id, None)) is not None:
                    host.on_fork_failed(text)
            case Exited(id=host_id, status=status):
                if (host := self.hosts.pop(host_id, None)) is not None:
                    host.on_ended(status)
                self._release(host_id)

    def _release(self, host_id: int) -> None:
        try:
            self._control.send(msgspec.msgpack.encode(Release(host_id)))
        except BlockingIOError:
            self._loop.call_later(RETRY_S, self._release, host_id)
        except OSError:
            self._lost()

    def _lost(self) -> None:
        """The zygote is gone or told to go: so are its hosts (it kills them, or their parent-death
        signal does)."""
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        if not self._ready.done():
            gone = InfrastructureFailure(
                "the code hosts' zygote ended while starting", operation="code_host.zygote"
            )
            self._ready.set_exception(gone)
            self._ready.exception()
        if self._preloaded is not None and not self._preloaded.done():
            self._preloaded.set_exception(TimeoutError("the zygote ended while importing"))
            self._preloaded.exception()
        for host_id, host in list(self.hosts.items()):
            self._drop(host_id)
            host.on_fork_failed("the zygote is gone")

    def _drop(self, host_id: int) -> None:
        self.hosts.pop(host_id, None)
        self._close_fds(host_id)

    def _close_fds(self, host_id: int) -> None:
        fds = self._fds.pop(host_id, None)
        if fds is not None:
            fds[0].close()
            os.close(fds[1])


def _module(info: CodeInfo) -> str:
    return info.path.partition(":")[0]
