"""The whole service beside a floor, in one run.

The floor is a raw aiohttp loop in one process: N episodes of T turns against the same scripted backend,
token ids in and out, nothing parsed, recorded, stored or delivered. What the service adds is all of
that. Prints CPU milliseconds a call of both, and their ratio; medians over rounds.

    .venv/bin/python bench/rollouts.py [--episodes 512] [--turns 8] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import uvloop

from rollserve.cli.processes import Processes
from rollserve.tiny_tokenizer import TinyTokenizer


async def floor_episode(session: aiohttp.ClientSession, url: str, turns: int, prompt: list[int]) -> None:
    """Send the growing ids, take the answer's ids, add a few for the tool's answer."""
    ids = list(prompt)
    for turn in range(turns):
        body = {
            "request_id": f"floor-{id(ids)}-{turn}",
            "model": "scripted",
            "token_ids": ids,
            "sampling_params": {"max_tokens": 200, "temperature": 1.0, "logprobs": 0},
        }
        async with session.post(f"{url}/inference/v1/generate", data=msgspec.json.encode(body)) as answer:
            choice = msgspec.json.decode(await answer.read())["choices"][0]
        ids = [*ids, *choice["token_ids"], *prompt[-12:]]


async def floor_round(url: str, episodes: int, turns: int) -> tuple[float, float]:
    """CPU milliseconds a call, and calls a second."""
    tokenizer = TinyTokenizer()
    prompt = tokenizer.encode("<|im_start|>user\nEcho what you are told.<|im_end|>\n<|im_start|>assistant\n")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers={"Content-Type": "application/json"}
    ) as one:
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(floor_episode(one, url, turns, prompt) for _ in range(episodes)))
        calls = episodes * turns
        return 1000 * (time.process_time() - cpu) / calls, calls / (time.perf_counter() - wall)


async def floor(episodes: int, turns: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        url = f"http://127.0.0.1:{processes.port()}"
        command = [
            *(sys.executable, "-m", "rollserve.testing.scripted_server", "--model", "scripted"),
            *("--port", url.rsplit(":", 1)[1], "--turns", str(turns), "--tokens", "200"),
        ]
        try:
            await processes.wait_ready(processes.start("scripted", command), f"{url}/health", 60)
            await floor_round(url, 8, turns)
            results = [await floor_round(url, episodes, turns) for _ in range(rounds)]
        finally:
            processes.stop()
    return {
        "cpu_ms_per_call": round(median(cpu for cpu, _ in results), 3),
        "calls_per_s": round(median(rate for _, rate in results), 1),
    }


def service(episodes: int, turns: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "rollserve", "bench", "--json"]
    command += ["--episodes", str(episodes), "--turns", str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    low = uvloop.run(floor(options.episodes, options.turns, options.rounds))
    ours = service(options.episodes, options.turns)
    ratio = round(ours["cpu_ms_per_call"] / low["cpu_ms_per_call"], 2)
    result = {"floor": low, "rollserve": ours, "cpu_ratio": ratio}
    if options.json:
        print(json.dumps(result))
        return
    print(f"floor      {low['cpu_ms_per_call']:6.3f} ms CPU a call, {low['calls_per_s']:8.1f} calls/s")
    print(f"rollserve  {ours['cpu_ms_per_call']:6.3f} ms CPU a call, {ours['calls_per_s']:8.1f} calls/s")
    print(f"ratio      {ratio}; lost {ours['lost']}, loop lag p99 {ours['loop_lag_ms_p99']} ms")


if __name__ == "__main__":
    main()
