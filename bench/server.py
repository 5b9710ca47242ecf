"""CPU of the server per rollout, from submit to ack, over HTTP; and how late its event loop gets.

    .venv/bin/python bench/server.py [--groups 500] [--rollouts 8] [--form msgpack]

The client is another process; workers are played in the server's (their part is a few µs each).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import httpx
import msgspec
import uvicorn

from rollserve.api.app import make_app
from rollserve.api.auth import Auth
from rollserve.config import ApiSettings
from rollserve.executor.base import StartAttempt
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, a_call, ended
from rollserve.testing.server_room import a_room
from rollserve.wire import Delivery, parse_lease

TASK = {"instruction": "x" * 2000, "grader": {"name": "exact", "options": {"answer": "42"}}}


def client(url: str, groups: int, rollouts: int, form: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as http:
        http.post("/v1/policies", json={"name": "p", "model": "m", "tokenizer": "tiny"})
        run = http.post("/v1/runs", json={"policy": "p"}).json()["id"]
        body = {"groups": [{"task": TASK, "num_rollouts": rollouts}] * 20}
        for _ in range(groups // 20):
            http.post(f"/v1/runs/{run}/groups", json=body).raise_for_status()
        got = 0
        while got < groups:
            answer = http.post(
                f"/v1/runs/{run}/deliveries",
                json={"max_groups": 8, "wait_s": 20},
                headers={"Accept": f"application/{form}"},
            )
            decode = msgspec.msgpack.decode if form == "msgpack" else msgspec.json.decode
            lease = parse_lease(decode(answer.content, type=Delivery))
            if lease is not None:
                http.post(f"/v1/deliveries/{lease.id}/ack").raise_for_status()
                got += len(lease.group_ids)


async def measure(groups: int, rollouts: int, form: str, turns: int, tokens: int) -> None:
    payloads = FakePayloads()
    calls = [
        a_call(f"c{turn}", parent=f"c{turn - 1}" if turn else None, prompt=100, sampled=tokens)
        for turn in range(turns)
    ]
    payload = AttemptPayload(calls=calls)

    def play(executor: FakeExecutor, _: str, start: StartAttempt) -> None:
        ref = payloads.keep(start.attempt_id, payload)
        executor.end(start.attempt_id, ended(start, payload=ref))

    with tempfile.TemporaryDirectory() as folder:
        executor = FakeExecutor(workers=2, capacity=256, play=play)
        async with a_room(Path(folder), executor, payloads=payloads) as room:
            app = make_app(room.core, ApiSettings(), Auth(room.store, required=False))
            config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            await room.until(lambda: server.started)
            gc.collect()
            gc.freeze()  # as a server should: what start-up made is not looked through again
            url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            other = multiprocessing.get_context("spawn").Process(
                target=client, args=(url, groups, rollouts, form)
            )
            cpu, began = time.process_time(), time.monotonic()
            other.start()
            await asyncio.to_thread(other.join)
            wall = time.monotonic() - began
            total = groups * rollouts
            print(
                f"{total} rollouts, {turns}x{tokens} tokens, {form}: "
                f"{(time.process_time() - cpu) / total * 1000:.2f} ms CPU a rollout, "
                f"{total / wall:.0f} rollouts/s, loop lag p99 "
                f"{(await room.core.status.snapshot()).loop_lag_ms_p99:.1f} ms, "
                f"rss {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB"
            )
            room.core.begin_stop()
            server.should_exit = True
            await serving


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--form", default="msgpack")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    sys.setswitchinterval(0.001)  # as `rollserve serve` should: shorter waits of the event loop
    asyncio.run(measure(options.groups, options.rollouts, options.form, options.turns, options.tokens))
