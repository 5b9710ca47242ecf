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
import json
import multiprocessing
import os
import resource
import shlex
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httptools
import msgspec
import uvloop
from aiohttp import web

from rollserve.backend.pool import BackendPool
from rollserve.build.http import HttpServer
from rollserve.build.process import tune_process
from rollserve.build.worker import PRELOAD
from rollserve.executor.base import PolicyView
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.http import make_app
from rollserve.gateway.service import GatewayService
from rollserve.gateway.tokens import load_tokenizer
from rollserve.records.policy import Backend, BackendInfo, BackendSpec, Policy, PolicySpec
from rollserve.records.run import RunSpec
from rollserve.records.task import Limits
from rollserve.store.payloads import FilePayloadStore
from rollserve.testing.scripted import Chunk, logprob_of
from rollserve.testing.scripted_bodies import encode_stream, encode_whole

TOKENS = 200
PROMPT_TOKENS = 2000
CALIBRATED_MS = 40.0
FLUSHES = 10
WORDS = ("solve", "the", "next", "step", "file", "error", "import", "value", "test", "return", "path", "x=1;")
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"


# -- the engine


class Engine(asyncio.Protocol):
    """Answers after ``latency_s`` from bodies made once; a stream is spread over it."""

    def __init__(self, latency_s: float, bodies: dict[str, tuple[bytes, list[bytes]]]) -> None:
        self._latency_s = latency_s
        self._bodies = bodies
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url = url.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        whole, events = self._bodies.get(self._url, (b"{}", []))
        if b'"stream":true' in b"".join(self._body).replace(b" ", b""):
            head = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(b"HTTP/1.1 200 OK\r\n" + head)
            self._flush(events, 0)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(whole)
        self._loop.call_later(self._latency_s, self._transport.write, head + whole)

    def _flush(self, events: list[bytes], at: int) -> None:
        """One HTTP chunk for each event, as uvicorn does."""
        end = at + -(-len(events) // FLUSHES)
        out = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events[at:end])
        if end >= len(events):
            self._transport.write(out + b"0\r\n\r\n")
            return
        self._transport.write(out)
        self._loop.call_later(self._latency_s / (FLUSHES - 1), self._flush, events, end)


def answers(tokenizer_name: str) -> dict[str, tuple[bytes, list[bytes]]]:
    """The whole and the streamed answer of each route: ``TOKENS`` ids with logprobs."""
    tokenizer = load_tokenizer(tokenizer_name)
    ids = [*(tokenizer.encode(" ".join(WORDS)) * TOKENS)[: TOKENS - 1], tokenizer.eos_token_id or 0]
    chunks = [
        Chunk([token_id], [logprob_of(token_id)], "0", "stop" if index == TOKENS - 1 else None)
        for index, token_id in enumerate(ids)
    ]
    whole = encode_whole([Chunk(ids, [logprob_of(each) for each in ids], "0", "stop")], "r", "m", None)
    streamed = (encode_stream(chunks[: end + 1], "r", "m", None) for end in range(TOKENS))
    events, done = [b"data: " + event + b"\n\n" for event in streamed], b"data: [DONE]\n\n"
    return {
        GENERATE: (whole, [*events, done]),
        CHAT: (_chat(tokenizer, ids), [*_chunks(tokenizer, ids), done]),
    }


def _entry(tokenizer: Any, token_id: int) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    logprob = logprob_of(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def _chat(tokenizer: Any, ids: list[int]) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": tokenizer.decode(ids[:-1])},
        "logprobs": {"content": [_entry(tokenizer, token_id) for token_id in ids]},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": TOKENS}
    usage["total_tokens"] = sum(usage.values())
    document = {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": usage}
    return msgspec.json.encode(
        {**document, "prompt_token_ids": [index * 71 % 150_000 for index in range(PROMPT_TOKENS)]}
    )


def _chunks(tokenizer: Any, ids: list[int]) -> Iterator[bytes]:
    for index, token_id in enumerate(ids):
        choice = {
            "index": 0,
            "delta": {"content": tokenizer.token_text(token_id)},
            "logprobs": {"content": [_entry(tokenizer, token_id)]},
            "finish_reason": "stop" if index == len(ids) - 1 else None,
            "token_ids": [token_id],
        }
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
        yield b"data: " + msgspec.json.encode(event) + b"\n\n"


async def engine_role(sock: socket.socket, options: argparse.Namespace, upstream: str) -> None:
    bodies = answers(options.tokenizer)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(options.latency_ms / 1e3, bodies), sock=sock)
    await server.serve_forever()


# -- the floors


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


def spent_by(pid: int) -> float:
    """CPU seconds of a process, to the system's tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the gateway


class NoClock:
    @contextmanager
    def pause(self) -> Iterator[None]:
        yield

    def refundable(self) -> Callable[[], None]:
        return lambda: None


class Desk:
    """Opens and closes the sessions of the bench, outside of what is measured."""

    def __init__(self, service: GatewayService, payloads: FilePayloadStore) -> None:
        self._service = service
        self._payloads = payloads
        self._open: list[Any] = []
        self._count = 0

    async def sessions(self, count: int) -> list[str]:
        """New ones in the place of those before."""
        for session, segment in self._open:
            await session.close()
            segment.discard()
        self._open.clear()
        for _ in range(count):
            self._count += 1
            segment = self._payloads.open_segment("bench", f"a{self._count}")
            limits = Limits(max_turns=10_000, max_sampled_tokens=10_000_000)
            spec = SessionSpec(
                attempt_id=f"a{self._count}",
                rollout_id="r",
                run=RunSpec(policy="p"),
                limits=limits,
                segment=segment,
                clock=NoClock(),
            )
            self._open.append((await self._service.open_session(spec), segment))
        return [session.secret for session, _ in self._open]


async def gateway_role(sock: socket.socket, options: argparse.Namespace, upstream: str) -> None:
    tune_process(PRELOAD)
    service = GatewayService(lambda policy: BackendPool(model="m"))
    info = BackendInfo(engine="vllm", models=["m"], logprobs_mode="processed", reports_versions=True)
    spec = PolicySpec(name="p", model="m", tokenizer=options.tokenizer)
    backend = Backend(id="b", policy="p", spec=BackendSpec(url=upstream), info=info)
    policy = Policy(spec=spec).model_dump_json().encode()
    view = PolicyView(revision=1, policy_json=policy, backends_json=[backend.model_dump_json().encode()])
    service.update_policy(view)
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(service, FilePayloadStore(Path(folder)))
        app = make_app(service)

        async def with_desk(scope: Any, receive: Any, send: Any) -> None:
            if scope.get("path", "").startswith("/bench/"):
                count = scope["query_string"].decode()
                found = await desk.sessions(int(count)) if count else spent()
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": msgspec.json.encode(found)})
            else:
                await app(scope, receive, send)

        await HttpServer(with_desk, sock).start()
        await asyncio.Event().wait()


# -- the load


class Connection(asyncio.Protocol):
    """One request after another."""

    def __init__(self) -> None:
        self._answered: asyncio.Future[int] | None = None
        self.first_at: float | None = None
        self.received = bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error or ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        if b"\ndata: " in data and self.first_at is None:
            self.first_at = time.perf_counter()
        self.received += data
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._answered is not None:
            self._answered.set_result(self._parser.get_status_code())

    async def ask(self, wire: bytes) -> bytes:
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self.first_at, self.received = None, bytearray()
        self.transport.write(wire)
        status = await self._answered
        if status != 200:
            raise RuntimeError(bytes(self.received)[:2000].decode())
        return bytes(self.received)


def wire(url: str, body: bytes, secret: str) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {url}\r\ncontent-type: application/json\r\n"
    return f"{head}authorization: Bearer {secret}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Load:
    """Of one run: milliseconds of each call."""

    wall_ms: list[float]
    first_ms: list[float]
    cpu_ms: float
    seconds: float


class Target:
    """A process under load. Without ``pid`` it says itself what it has spent."""

    def __init__(self, port: int, *, has_sessions: bool = False, pid: int | None = None) -> None:
        self.port = port
        self.has_sessions = has_sessions
        self._pid = pid

    async def cpu_s(self) -> float:
        """CPU seconds so far."""
        if self._pid is None:
            return float((await self.get("/bench/cpu"))["cpu_s"])
        return spent_by(self._pid)

    async def get(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with aiohttp.ClientSession() as client, client.get(url) as response:
            return msgspec.json.decode(await response.read())

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, "127.0.0.1", self.port)
        return made

    async def secrets(self, count: int) -> list[str]:
        found: list[str] = await self.get(f"/bench/sessions?{count}") if self.has_sessions else ["x"] * count
        return found

    async def load(self, bodies: list[bytes], connections: int, calls: int, per_session: int = 8) -> Load:
        """``bodies`` in turn, by closed loops; a session has ``per_session`` calls."""
        secrets = await self.secrets(-(-calls // per_session))
        wires = [
            wire(str(self.port), bodies[index % len(bodies)], secrets[index // per_session])
            for index in range(calls)
        ]
        waiting, wall, first = iter(wires), list[float](), list[float]()
        open_ones = [await self.connect() for _ in range(connections)]

        async def loop(connection: Connection) -> None:
            for each in waiting:
                begun = time.perf_counter()
                await connection.ask(each)
                wall.append((time.perf_counter() - begun) * 1e3)
                first.append(((connection.first_at or time.perf_counter()) - begun) * 1e3)

        before, begun = await self.cpu_s(), time.perf_counter()
        await asyncio.gather(*map(loop, open_ones))
        seconds = time.perf_counter() - begun
        used = await self.cpu_s() - before
        for each in open_ones:
            each.transport.close()
        return Load(wall, first, used * 1e3 / calls, seconds)


def text(size_bytes: int, seed: int = 0) -> str:
    """Words that differ with the seed."""
    state, out, size = seed * 7919 + 17, [], 0
    while size < size_bytes:
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        out.append(WORDS[(state >> 8) % len(WORDS)])
        size += len(out[-1]) + 1
    return " ".join(out)


def tools() -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"text": {"type": "string", "description": "text"}}}
    return [
        {"type": "function", "function": {"name": name, "description": text(200), "parameters": parameters}}
        for name in ("echo", "bash")
    ]


def request(size_bytes: int, seed: int, **more: Any) -> dict[str, Any]:
    """A conversation that some other program began: system, and two exchanges that this one did not see."""
    parts = [text(size_bytes // 5, seed * 5 + part) for part in range(5)]
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)]
    messages.append({"role": "user", "content": "go on"})
    return {"model": "m", "messages": messages, "tools": tools(), "max_tokens": TOKENS, **more}


def encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def calibrate() -> float:
    """CPU milliseconds of a fixed loop of arithmetic and JSON."""
    pairs = [{"x": number, "y": number / 7} for number in range(100)]
    document = json.dumps(
        {"ids": list(range(400)), "texts": [f"tok{number}" for number in range(400)], "pairs": pairs}
    )
    begun, total = time.process_time(), 0
    for number in range(300_000):
        total += number & 7
    for _ in range(60):
        json.dumps(json.loads(document))
    return (time.process_time() - begun) * 1e3


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


Measure = Callable[[dict[str, Target], int], Awaitable[dict[str, Any]]]


async def calls_of(
    targets: dict[str, Target], bodies: list[bytes], connections: int, calls: int, repeats: int = 3
) -> dict[str, Any]:
    """Each target in turn, ``repeats`` times."""
    loads: dict[str, list[Load]] = {name: [] for name in targets}
    for name, target in targets.items():
        await target.load(bodies[-8:], connections, connections * 2)
        for _ in range(repeats):
            loads[name].append(await target.load(bodies, connections, calls))
    found: dict[str, Any] = {"connections": connections, "calls": calls}
    for name, each in loads.items():
        found[name] = {
            "cpu_ms": median([load.cpu_ms for load in each]),
            "p50_ms": median([statistics.median(load.wall_ms) for load in each]),
            "first_p50_ms": median([statistics.median(load.first_ms) for load in each]),
            "calls_s": round(calls / statistics.median([load.seconds for load in each]), 1),
        }
    return found


async def one_session(target: Target, messages: list[Any], added: int, turns: int) -> list[dict[str, float]]:
    """Turn after turn, each with what the model said and ``added`` bytes of a user's."""
    (secret,) = await target.secrets(1)
    connection, found = await target.connect(), []
    for turn in range(turns):
        body = encoded({"model": "m", "messages": messages, "tools": tools()})
        before, begun = await target.cpu_s(), time.perf_counter()
        answer = await connection.ask(wire(str(target.port), body, secret))
        wall_ms = (time.perf_counter() - begun) * 1e3
        after = await target.cpu_s()
        found.append({"cpu_ms": (after - before) * 1e3, "wall_ms": wall_ms, "bytes": len(body)})
        said = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
        messages = [*messages, said, {"role": "user", "content": text(added, turn)}]
    connection.transport.close()
    return found


async def measure(targets: dict[str, Target], scale: int) -> None:
    both = {name: target for name, target in targets.items() if name not in ("engine", "pass")}
    chat = [encoded(request(7000, seed)) for seed in range(16)]
    for connections, calls in ((1, 10 * scale), (32, 60 * scale), (256, 100 * scale)):
        report("call, 8 kB, tools", await calls_of(both, chat, connections, calls))
    fresh = [encoded(request(7000, 1000 + seed)) for seed in range(60 * scale)]
    report("call, 8 kB that nobody has sent before", await calls_of(both, fresh, 32, 60 * scale, repeats=1))
    with_logprobs = [encoded(request(7000, seed, logprobs=True)) for seed in range(16)]
    for connections, calls in ((1, 10 * scale), (32, 60 * scale), (256, 100 * scale)):
        loads = await calls_of(both, with_logprobs, connections, calls)
        report("call, 8 kB, tools, logprobs in the answer", loads)
    streams = {name: target for name, target in targets.items() if name not in ("engine", "keep")}
    stream = [encoded(request(7000, seed, stream=True)) for seed in range(16)]
    for connections, calls in ((1, 5 * scale), (32, 40 * scale)):
        report("stream of 200 tokens", await calls_of(streams, stream, connections, calls))
    await long_context(targets, scale)
    await long_contexts(targets)
    await long_session(targets)
    await memory(targets["gateway"], chat, scale)


async def long_context(targets: dict[str, Target], scale: int) -> None:
    """128 kB of conversation: its first sight, and calls that go on from it."""
    start = request(128_000, 99)["messages"]
    turns = await one_session(targets["gateway"], start, 500, 12)
    again = [encoded(request(128_000, seed)) for seed in range(4)]
    floor = await targets["keep"].load(again, 1, 12)
    report(
        "128 kB of conversation",
        {
            "first_sight_cpu_ms": round(turns[0]["cpu_ms"], 2),
            "going_on_cpu_ms": median([turn["cpu_ms"] for turn in turns[2:]]),
            "going_on_wall_ms": median([turn["wall_ms"] for turn in turns[2:]]),
            "keep_cpu_ms": round(floor.cpu_ms, 3),
        },
    )


async def long_contexts(targets: dict[str, Target], connections: int = 32, turns: int = 8) -> None:
    """Sessions of 128 kB at the same time, each going on: CPU of a call, its prefix already in the tree."""
    gateway = targets["gateway"]
    secrets = await gateway.secrets(connections)
    talks = [(await gateway.connect(), secret, request(128_000, 99)["messages"]) for secret in secrets]

    async def go_on(turn: int) -> None:
        async def one(connection: Connection, secret: str, messages: list[Any]) -> None:
            body = encoded({"model": "m", "messages": messages, "tools": tools()})
            answer = await connection.ask(wire(str(gateway.port), body, secret))
            said = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
            messages += [said, {"role": "user", "content": text(500, turn)}]

        await asyncio.gather(*(one(*talk) for talk in talks))

    await go_on(0)
    spent_ms = []
    for turn in range(1, turns + 1):
        before = await gateway.cpu_s()
        await go_on(turn)
        spent_ms.append((await gateway.cpu_s() - before) * 1e3 / connections)
    for connection, _, _ in talks:
        connection.transport.close()
    again = [encoded(request(128_000, seed)) for seed in range(4)]
    floor = await targets["keep"].load(again, connections, connections * turns)
    found = {"cpu_ms": median(spent_ms)}
    report(
        "128 kB going on, many at once",
        {"connections": connections, "gateway": found, "keep": {"cpu_ms": round(floor.cpu_ms, 3)}},
    )


async def long_session(targets: dict[str, Target]) -> None:
    """200 turns: what a call costs at its beginning and at its end, and for how many bytes."""
    start = [{"role": "system", "content": text(1000)}, {"role": "user", "content": "go"}]
    turns = await one_session(targets["gateway"], list(start), 400, 200)
    found = {}
    for name, part in (("first_20", turns[1:21]), ("middle_20", turns[90:110]), ("last_20", turns[-20:])):
        found[name] = {key: median([turn[key] for turn in part]) for key in ("cpu_ms", "wall_ms", "bytes")}
    report("a session of 200 turns", found)


async def memory(gateway: Target, chat: list[bytes], scale: int) -> None:
    """Resident megabytes after each round of calls, their sessions closed."""
    resident = []
    for _ in range(5):
        await gateway.load(chat, 32, 25 * scale)
        await gateway.secrets(1)
        resident.append(round((await gateway.get("/bench/cpu"))["rss_mb"], 1))
    report(f"memory after each {25 * scale} calls", {"rss_mb": resident})


def report(what: str, found: dict[str, Any]) -> None:
    gateway, calib_ms = found.get("gateway"), calibrate()
    if isinstance(gateway, dict):
        others = {name: each["cpu_ms"] for name, each in found.items() if isinstance(each, dict)}
        found["ratio"] = {
            name: round(gateway["cpu_ms"] / cpu_ms, 2) for name, cpu_ms in others.items() if name != "gateway"
        }
        found["norm"] = round(gateway["cpu_ms"] * CALIBRATED_MS / calib_ms, 2)
    print(json.dumps({"what": what, "calib_ms": round(calib_ms, 1), **found}), flush=True)


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
