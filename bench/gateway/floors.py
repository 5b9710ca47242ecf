"""The least that a proxy can do: ``keep`` asks for ids and logprobs and keeps them, ``pass`` looks at
nothing."""

from __future__ import annotations

import argparse
import asyncio
import resource
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web


async def floor_role(sock: socket.socket, upstream: str, keep: bool) -> None:
    kept: dict[int, Any] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def post(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            asked = msgspec.json.decode(body) if keep else {}
            if keep:
                body = msgspec.json.encode({**asked, "logprobs": True, "return_token_ids": True})
            headers = {"content-type": "application/json"}
            async with client.post(upstream + request.path_qs, data=body, headers=headers) as response:
                if response.content_type == "text/event-stream":
                    stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
                    await stream.prepare(request)
                    async for part in response.content.iter_any():
                        await stream.write(part)
                    await stream.write_eof()
                    return stream
                answer = await response.read()
            if keep:
                document = msgspec.json.decode(answer)
                choice = document["choices"][0]
                logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                kept[len(kept) % 4096] = (document["prompt_token_ids"], choice["token_ids"], logprobs)
            return web.Response(body=answer, content_type="application/json")

        async def cpu(request: web.Request) -> web.Response:
            return web.json_response(spent())

        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/bench/cpu", cpu)
        app.router.add_post("/{path:.*}", post)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, sock).start()
        await asyncio.Event().wait()


async def keep_role(sock: socket.socket, options: argparse.Namespace, upstream: str) -> None:
    await floor_role(sock, upstream, True)


async def pass_role(sock: socket.socket, options: argparse.Namespace, upstream: str) -> None:
    await floor_role(sock, upstream, False)


def spent() -> dict[str, float]:
    """CPU seconds and the resident megabytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"cpu_s": time.process_time(), "rss_mb": pages * resource.getpagesize() / 1e6}
