"""What is measured."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import msgspec

from gateway.bodies import encoded, request, text, tools
from gateway.load import Connection, Load, Target, wire
from gateway.report import median, report


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
