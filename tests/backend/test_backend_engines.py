"""A router in front of engines is refused, and its engines are named."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from rollserve.backend.base import Backend
from rollserve.errors import InvalidInput
from rollserve.records.policy import BackendKind
from rollserve.testing.asgi import Receive, Scope, Send, answer, send_body
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.testing.scripted_sglang import SglangApp

Connect = Callable[..., Backend]
KINDS = pytest.mark.parametrize("kind", [BackendKind.VLLM, BackendKind.SGLANG, BackendKind.OPENAI])


def make(kind: BackendKind, engine: ScriptedEngine) -> ScriptedApp:
    return SglangApp(engine) if kind is BackendKind.SGLANG else ScriptedApp(engine)


def add(app: ScriptedApp, path: str, body: Any) -> None:
    async def show(scope: Scope, asked: bytes, receive: Receive, send: Send) -> None:
        await answer(send, 200, body)

    app.add_route(path, show)


@KINDS
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/workers", {"workers": [{"id": "1", "url": "http://a:1"}, {"id": "2", "url": "http://b:2"}]}),
        ("/list_workers", {"urls": ["http://a:1", "http://b:2"]}),
        ("/engines", [{"engine_id": "http://a:1"}, {"engine_id": "http://b:2"}]),
    ],
)
async def test_a_router_names_its_engines(
    engine: ScriptedEngine, connect: Connect, kind: BackendKind, path: str, body: Any
) -> None:
    app = make(kind, engine)
    add(app, path, body)
    async with serving(app) as url:
        with pytest.raises(InvalidInput, match=f"not an engine .it lists 2 engines at {path}") as caught:
            await connect(url, kind).probe()
    assert caught.value.field == "url"
    assert caught.value.hint == "register its engines one by one: http://a:1, http://b:2"


@KINDS
@pytest.mark.parametrize("body", [{"message": "no"}, {"workers": 3}, [{"name": "x"}], "text"])
async def test_other_answers_are_no_list(
    engine: ScriptedEngine, connect: Connect, kind: BackendKind, body: Any
) -> None:
    app = make(kind, engine)
    add(app, "/workers", body)
    async with serving(app) as url:
        assert (await connect(url, kind).probe()).models == ["scripted"]


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_plain_balancer_shows_by_its_processes(
    engine: ScriptedEngine, connect: Connect, processes: int
) -> None:
    app, turn = ScriptedApp(engine), itertools.count()

    async def metrics(scope: Scope, asked: bytes, receive: Receive, send: Send) -> None:
        started = 1.7e9 + next(turn) % processes
        await send_body(send, 200, f"process_start_time_seconds {started}\n".encode())

    app.add_route("/metrics", metrics)
    async with serving(app) as url:
        if processes == 1:
            assert await connect(url, BackendKind.VLLM).probe()
            return
        with pytest.raises(InvalidInput, match="answered by 2 processes") as caught:
            await connect(url, BackendKind.VLLM).probe()
    assert caught.value.field == "url"


@KINDS
async def test_metrics_and_models_may_be_long(
    engine: ScriptedEngine, connect: Connect, kind: BackendKind
) -> None:
    """Of an engine with a thousand adapters, and histograms of each."""
    app = make(kind, engine)

    async def metrics(scope: Scope, asked: bytes, receive: Receive, send: Send) -> None:
        await send_body(send, 200, b"# HELP much of it\n" * 100_000)

    app.add_route("/metrics", metrics)
    async with serving(app) as url:
        assert (await connect(url, kind).probe()).models == ["scripted"]
        models = [{"id": "scripted"}, *({"id": f"adapter-{at}", "root": "x" * 1000} for at in range(1500))]
        add(app, "/v1/models", {"object": "list", "data": models})
        assert len((await connect(url, kind).probe()).models) == 1501


@pytest.mark.parametrize(
    ("kind", "path"),
    [(BackendKind.VLLM, "/inference/v1/abort_requests"), (BackendKind.SGLANG, "/abort_request")],
)
async def test_without_an_abort_it_is_no_backend(
    engine: ScriptedEngine, connect: Connect, kind: BackendKind, path: str
) -> None:
    app = make(kind, engine)

    async def missing(scope: Scope, asked: bytes, receive: Receive, send: Send) -> None:
        await send_body(send, 404, json.dumps({"detail": "Not Found"}).encode())

    app.add_route(path, missing)
    async with serving(app) as url:
        with pytest.raises(InvalidInput, match=f"can't abort: POST {path} gave HTTP 404") as caught:
            await connect(url, kind).probe()
    assert caught.value.field == "url"
