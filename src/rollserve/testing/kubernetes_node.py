"""Run inside what plays a pod, by its path: starts the commands of exec calls. Only the standard library.

A caller on the Unix socket says a line of JSON, the command, and then its stdin until it shuts its side. It
is answered in frames: a channel (1 stdout, 2 stderr, 3 the exit code in digits), four bytes of length, the
data.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

FRAME_BYTES = 32768
"""As a kubelet copies."""


def _frame(channel: int, data: bytes) -> bytes:
    return bytes([channel]) + len(data).to_bytes(4, "big") + data


async def _copy(source: asyncio.StreamReader, channel: int, writer: asyncio.StreamWriter) -> None:
    while data := await source.read(FRAME_BYTES):
        writer.write(_frame(channel, data))
        await writer.drain()


async def _feed(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(FRAME_BYTES):
            sink.write(data)
            await sink.drain()
        sink.close()
    except (BrokenPipeError, ConnectionResetError):
        return


async def execute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    command = json.loads(await reader.readline())
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    feeding = asyncio.create_task(_feed(reader, process.stdin))
    await asyncio.gather(_copy(process.stdout, 1, writer), _copy(process.stderr, 2, writer))
    writer.write(_frame(3, str(await process.wait()).encode()))
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    writer.close()


async def main(path: str) -> None:
    server = await asyncio.start_unix_server(execute, path + ".part")
    os.rename(path + ".part", path)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
