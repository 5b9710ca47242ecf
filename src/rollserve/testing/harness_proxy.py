#!/usr/bin/env python3
"""Stands in a sandbox for a harness's program, and breaks its connections: each request goes through a TCP
proxy that drops the first one before a byte of the reply, and once a reply in its middle (where there is a
mark for it).

Stands alone (``harness_trial.breaking`` copies it into an installation, and the program is then ``REAL``).
``TRIAL_UPSTREAM`` is the address in the program's environment and settings that is replaced, ``TRIAL_MARK``
the text of a reply behind which it breaks off, or nothing. What it did is told on stderr.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

REAL = ".real"
PATIENCE_S = 0.5
"""A whole answer has no early byte: so long after the request it is surely being generated."""


class Proxy:
    """Between one program and ``host:port``."""

    def __init__(self, host: str, port: int, mark: bytes) -> None:
        self._host = host
        self._port = port
        self._mark = mark
        self._before = True
        self._middle = bool(mark)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        one = _Connection()
        pumps = [
            asyncio.create_task(self._requests(reader, up_writer, one)),
            asyncio.create_task(self._replies(up_reader, writer, one)),
            asyncio.create_task(self._drop_first(one)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for each in (writer, up_writer):
            if one.breaks:
                each.transport.abort()
            else:
                each.close()

    async def _requests(
        self, reader: asyncio.StreamReader, up: asyncio.StreamWriter, one: _Connection
    ) -> None:
        while data := await reader.read(1 << 16):
            if data.startswith(b"POST ") and b"count" not in data.split(b"\r\n", 1)[0].lower():
                one.reply = b""
                one.asked.set()
            up.write(data)
            await up.drain()

    async def _drop_first(self, one: _Connection) -> None:
        await one.asked.wait()
        if self._before:
            await asyncio.sleep(PATIENCE_S)
        if self._before:
            self._break(one, "before a reply")
            self._before = False
            return
        await asyncio.Event().wait()

    async def _replies(
        self, up: asyncio.StreamReader, writer: asyncio.StreamWriter, one: _Connection
    ) -> None:
        while data := await up.read(1 << 16):
            if one.asked.is_set() and self._before:
                self._before = False
                self._break(one, "before a reply")
                return
            seen, one.reply = len(one.reply), one.reply + data
            if self._middle and one.asked.is_set() and self._mark in one.reply:
                self._middle = False
                self._break(one, "in the middle of a reply")
                writer.write(one.reply[seen : one.reply.index(self._mark) + len(self._mark)])
                await writer.drain()
                await asyncio.sleep(PATIENCE_S / 10)  # aborting throws away what is not sent yet
                return
            writer.write(data)
            await writer.drain()

    def _break(self, one: _Connection, when: str) -> None:
        one.breaks = True
        sys.stderr.write(f"proxy: dropped a connection {when}\n")


class _Connection:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.reply = b""
        self.breaks = False


def _rewrite(home: Path, old: str, new: str) -> None:
    for path in home.rglob("*"):
        if path.is_file() and old in (text := path.read_text(errors="replace")):
            path.write_text(text.replace(old, new))


async def run(arguments: list[str], environment: dict[str, str]) -> int:
    """The program's exit code."""
    upstream = urlsplit(environment["TRIAL_UPSTREAM"])
    proxy = Proxy(str(upstream.hostname), upstream.port or 80, environment["TRIAL_MARK"].encode())
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    own = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    replaced = {name: text.replace(upstream.netloc, own) for name, text in environment.items()}
    await asyncio.to_thread(_rewrite, Path(environment["HOME"]), upstream.netloc, own)
    program = str(Path(sys.argv[0]).parent / REAL)
    process = await asyncio.create_subprocess_exec(
        program, *arguments, env=replaced, stdin=subprocess.DEVNULL
    )
    return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1:], dict(os.environ))))
