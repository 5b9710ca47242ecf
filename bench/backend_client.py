"""CPU of this process per model call through the pool and the vLLM adapter, against the scripted server
in a process of its own: 1,000 prompt tokens, 200 sampled tokens with logprobs.

``PYTHONPATH=src python bench/backend_client.py [--calls 2000] [--concurrency 64] [--stream]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from rollserve.backend.base import GenerateRequest
from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.records import policy
from rollserve.records.call import SamplingParams
from rollserve.records.policy import BackendInfo, BackendKind, BackendSpec


@contextmanager
def scripted_server(latency_ms: float, tokens: int) -> Iterator[tuple[str, int]]:
    """Its URL and process id."""
    command = [sys.executable, "-m", "rollserve.testing.scripted_server", "--port", "0"]
    command += ["--latency-ms", str(latency_ms), "--tokens", str(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.terminate()


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


async def measure(url: str, options: argparse.Namespace) -> dict[str, float]:
    pool = BackendPool(model="scripted", settings=PoolSettings(concurrency="off"))
    info = BackendInfo(engine="scripted", models=["scripted"])
    spec = BackendSpec(url=url, kind=BackendKind.SCRIPTED)
    pool.update([policy.Backend(id="a", policy="p", spec=spec, info=info)])
    prompt = [100 + at % 300 for at in range(options.prompt_tokens)]
    sampling = SamplingParams(max_tokens=4096)
    left = iter(range(options.calls))
    sampled = 0

    async def worker(session: str) -> None:
        nonlocal sampled
        for number in left:
            request = GenerateRequest(
                request_id=f"r{number}", model="scripted", token_ids=prompt, sampling=sampling, cache_salt="1"
            )
            sink = (lambda ids, logprobs: None) if options.stream else None
            routed = await pool.generate(session, request, sink)
            assert routed.generation.prompt_ids == prompt
            sampled += len(routed.generation.token_ids)

    await pool.generate(
        "warm", GenerateRequest(request_id="w", model="scripted", token_ids=prompt, sampling=sampling)
    )
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker(f"s{n}") for n in range(options.concurrency)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    await pool.close()
    return {
        "cpu_ms_per_call": round(1000 * cpu / options.calls, 3),
        "calls_per_s": round(options.calls / wall, 1),
        "tokens_per_call": round(sampled / options.calls, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    with scripted_server(options.latency_ms, options.tokens) as (url, pid):
        before = cpu_s(pid)
        found = uvloop.run(measure(url, options))
        found["server_cpu_ms_per_call"] = round(1000 * (cpu_s(pid) - before) / options.calls, 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
