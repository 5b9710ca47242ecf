"""How long a cancelled attempt's generation goes on: ``python bench/aborts.py [--cancels 100] [--beside 8]``.

The whole service (server and worker processes, no sandbox) on a scripted engine that samples nothing until
it is aborted. Each time one attempt is in the middle of its call, its group is cancelled over HTTP, and the
time is taken from the request to the engine's leaving that generation. ``--beside`` attempts stay in flight
all the while.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from rollserve.backend.base import GenerateRequest
from rollserve.client import Client
from rollserve.records.policy import BackendKind
from rollserve.records.task import GraderSpec, Task
from rollserve.testing.harness_trial import service
from rollserve.testing.scripted import Chunk, ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend

WAIT_S = 30.0
SETTLE_S = 0.05


class StillEngine(ScriptedEngine):
    """Says when a generation begins, and when it is left."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.clear()
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.left: asyncio.Queue[tuple[str, float]] = asyncio.Queue()

    async def run(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        self.begun.put_nowait(request.request_id)
        try:
            async with aclosing(super().run(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.left.put_nowait((request.request_id, time.perf_counter()))


def asking() -> Task:
    return Task(
        instruction="Say something.",
        runtime="none",
        tools=[],
        grader=GraderSpec(name="numeric", options={"answer": 42}),
    )


async def measure(client: Client, engine: StillEngine, cancels: int, beside: int) -> list[float]:
    """Milliseconds, one a cancel."""
    run = await client.open_run(OpenRun(policy="still"))
    await run.submit([asking() for _ in range(beside)], num_rollouts=1)
    for _ in range(beside):
        await asyncio.wait_for(engine.begun.get(), WAIT_S)
    found: list[float] = []
    for _ in range(cancels):
        (group,) = await run.submit([asking()], num_rollouts=1)
        request_id = await asyncio.wait_for(engine.begun.get(), WAIT_S)
        await asyncio.sleep(SETTLE_S)
        started = time.perf_counter()
        await client.cancel_group(group.id)
        left_id, at = await asyncio.wait_for(engine.left.get(), WAIT_S)
        if left_id != request_id:
            raise RuntimeError("another generation ended than the one that was cancelled")
        found.append((at - started) * 1000)
    return found


async def bench(cancels: int, beside: int) -> list[float]:
    engine = StillEngine()
    with tempfile.TemporaryDirectory(prefix="rollserve-aborts-") as folder:
        async with (
            serving(ScriptedApp(engine)) as backend,
            service(Path(folder) / "none", Path(folder)) as url,
            Client(url) as client,
        ):
            await client.create_policy(CreatePolicy(name="still", model="scripted", tokenizer="tiny"))
            engine.gate.set()  # what a backend is asked when it registers is answered
            await client.register_backend("still", RegisterBackend(url=backend, kind=BackendKind.VLLM))
            while not engine.begun.empty():
                engine.begun.get_nowait()
            while not engine.left.empty():
                engine.left.get_nowait()
            engine.gate.clear()
            return await measure(client, engine, cancels, beside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cancels", type=int, default=100)
    parser.add_argument("--beside", type=int, default=8, help="attempts that stay in flight")
    options = parser.parse_args()
    took = sorted(asyncio.run(bench(options.cancels, options.beside)))
    cuts = statistics.quantiles(took, n=100, method="inclusive")
    over = sum(each > 100 for each in took)
    print(f"{len(took)} cancels, {options.beside} attempts beside: from the request to the engine's leaving")
    print(f"p50 {cuts[49]:.1f} ms, p95 {cuts[94]:.1f} ms, max {took[-1]:.1f} ms; over 100 ms: {over}")


if __name__ == "__main__":
    main()
