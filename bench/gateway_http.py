"""The gateway over HTTP beside two floors, in one run: ``python bench/gateway_http.py [--scale 20]``.

Processes on loopback: an engine that answers from memory as vLLM does (a token route, and a chat route that
also gives the ids of the prompt), the gateway, and two proxies that stand for the least that can be done:
``keep`` (plain aiohttp, asks for ids and logprobs and keeps them) and ``pass`` (the same, looks at nothing).
``--peer NAME="command {port} {upstream}"`` starts another proxy beside them. Prints the CPU of a call in
each, its ratio to the floor, and times. ``calib_ms`` is a fixed loop: machines are noisy; ``norm`` is the CPU
of a call where that loop takes 40 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import uvloop
from gateway.cases import measure
from gateway.desk import gateway_role
from gateway.engine import engine_role
from gateway.floors import keep_role, pass_role
from gateway.load import Target

ROLES = {"engine": engine_role, "keep": keep_role, "pass": pass_role, "gateway": gateway_role}


def run_role(role: str, sock: socket.socket, options: argparse.Namespace, upstream: str) -> None:
    uvloop.run(ROLES[role](sock, options, upstream))


async def until_ready(target: Target) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                (await target.connect()).transport.close()
                return
            except OSError:
                await asyncio.sleep(0.1)


async def drive(targets: dict[str, Target], options: argparse.Namespace) -> None:
    for target in targets.values():
        await until_ready(target)
    await measure(targets, options.scale)


@contextmanager
def roles(options: argparse.Namespace) -> Iterator[dict[str, Target]]:
    """Our own processes, by name."""
    targets, processes, upstream = dict[str, Target](), [], ""
    context = multiprocessing.get_context("spawn")
    try:
        for role in ROLES:
            sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
            targets[role] = Target(sock.getsockname()[1], has_sessions=role == "gateway")
            process = context.Process(target=run_role, args=(role, sock, options, upstream), daemon=True)
            process.start()
            processes.append(process)
            upstream = upstream or f"http://127.0.0.1:{targets[role].port}"
            sock.close()
        yield targets
    finally:
        for process in processes:
            process.terminate()
            process.join(10)


@contextmanager
def peers(commands: list[str], upstream: str) -> Iterator[dict[str, Target]]:
    """Proxies of others, by name: ``NAME=command``."""
    with ExitStack() as running:
        found = {}
        for each in commands:
            name, _, command = each.partition("=")
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            words = shlex.split(command.format(port=port, upstream=upstream))
            process = running.enter_context(subprocess.Popen(words))
            running.callback(process.terminate)
            found[name] = Target(port, pid=process.pid)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default="tiny", help="or a directory; with Qwen3's control tokens")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="of the engine")
    parser.add_argument("--scale", type=int, default=20, help="calls in a run, about 60 times that")
    parser.add_argument("--peer", action="append", default=[], help="NAME=command {port} {upstream}")
    options = parser.parse_args()
    with roles(options) as own, peers(options.peer, f"http://127.0.0.1:{own['engine'].port}") as others:
        uvloop.run(drive({**own, **others}, options))


if __name__ == "__main__":
    main()
