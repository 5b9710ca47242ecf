"""A scripted server on a real socket, and clients of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from rollserve.backend.base import Backend, GenerateRequest
from rollserve.backend.registry import make_backend
from rollserve.records.call import SamplingParams
from rollserve.records.policy import BackendKind, BackendSpec
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving

from .pool_bench import Bench, closing


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(context_tokens=256, label="step-7")


@pytest.fixture
def app(engine: ScriptedEngine) -> ScriptedApp:
    return ScriptedApp(engine)


@pytest.fixture
async def url(app: ScriptedApp) -> AsyncIterator[str]:
    async with serving(app) as address:
        yield address


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Backend]]:
    """``connect(url, kind=…, model=…, **options)``: a backend that is closed at the end."""
    made: list[Backend] = []

    def build(
        url: str, kind: BackendKind = BackendKind.VLLM, model: str = "scripted", **options: float
    ) -> Backend:
        backend = make_backend(BackendSpec(url=url, kind=kind, options=dict(options)), model)
        made.append(backend)
        return backend

    yield build
    for backend in made:
        await backend.close()


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    """``ask(request_id, token_ids, **sampling)``."""

    def build(
        request_id: str = "r1",
        token_ids: list[int] | None = None,
        model: str = "scripted",
        **sampling: Any,
    ) -> GenerateRequest:
        params = SamplingParams(**{"max_tokens": 16, **sampling})
        return GenerateRequest(
            request_id=request_id, model=model, token_ids=token_ids or [5, 6, 7], sampling=params
        )

    return build


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """``await eventually(lambda: …)``: until it is true, or the test's own time-out."""

    async def wait(condition: Callable[[], object]) -> None:
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0.002)
        raise TimeoutError("the condition did not come true")

    return wait


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine that nothing listens on but who asks for this one."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with closing(Bench()) as made:
        yield made
