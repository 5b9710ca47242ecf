"""An internet for tests of what leaves a sandbox: names with made-up addresses, and a server at every
address and port that says where one is. Nothing is sent."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Callable

from rollserve.sandbox.egress.gate import Internet, Stream

SITE, OTHER_SITE = "93.184.216.34", "151.101.0.223"
"""Addresses of the public network; what stands there is this file's."""


class FakeInternet:
    """``names`` are the answers by name, one after the other; the last one stays. ``received`` is what the
    servers got, by address and port; ``says`` is what one says there. ``answers`` False: they only listen.
    While ``resolves`` is cleared no name is found."""

    def __init__(self, names: dict[str, list[list[str]]] | None = None) -> None:
        self.names = names or {}
        self.asked: list[str] = []
        self.received: dict[tuple[str, int], bytes] = defaultdict(bytes)
        self.says: Callable[[str, int], str] = lambda address, port: f"this is {address}:{port}\n"
        self.answers = True
        self.reached = asyncio.Event()
        self.resolves = asyncio.Event()
        self.resolves.set()
        self._servers: set[asyncio.Task[None]] = set()

    @property
    def internet(self) -> Internet:
        return Internet(resolve=lambda host, port: self.resolve(host, port), dial=self.dial)

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        await self.resolves.wait()
        if host not in self.names:
            return [host]
        answers = self.names[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def dial(self, address: str, port: int) -> Stream:
        ours, theirs = socket.socketpair()
        served = await asyncio.open_connection(sock=theirs)
        task = asyncio.create_task(self._serve(address, port, served))
        self._servers.add(task)
        task.add_done_callback(self._servers.discard)
        return await asyncio.open_connection(sock=ours)

    async def _serve(self, address: str, port: int, stream: Stream) -> None:
        reader, writer = stream
        place = address, port
        self.received[place] += b""
        self.reached.set()
        try:
            while data := await reader.read(65536):
                self.received[place] += data
                if self.answers and b"\r\n\r\n" in self.received[place]:
                    text = self.says(address, port).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                    writer.write_eof()
                    break
            while data := await reader.read(65536):
                self.received[place] += data
        except OSError:
            return  # it was broken off
        finally:
            writer.transport.abort()

    async def close(self) -> None:
        for task in self._servers:
            task.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
