"""A look tells whether our server still stands at the address; what any server says of itself is bounded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from rollserve.backend.base import Backend
from rollserve.errors import InvalidInput
from rollserve.records.policy import BackendKind
from rollserve.testing.asgi import Receive, Scope, Send, served
from rollserve.testing.scripted import ScriptedEngine

Connect = Callable[..., Backend]
BOTH = pytest.mark.parametrize("kind", [BackendKind.VLLM, BackendKind.OPENAI])
HTML = b"<!DOCTYPE html><html><head><title>Welcome to nginx!</title></head></html>"


def _answering(content_type: bytes, body: bytes, chunks: int = 1) -> Callable[..., Awaitable[None]]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(chunks):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


@pytest.mark.parametrize("kind", list(BackendKind))
async def test_a_look_tells_another_server_from_ours(connect: Connect, kind: BackendKind) -> None:
    """Its health is well: only its models give it away."""
    for body, content_type in ((HTML, b"text/html"), (b'{"status": "ok"}', b"application/json")):
        async with served(_answering(content_type, body)) as url:
            backend = connect(url, kind)
            assert (await backend.health()).ok
            seen = await backend.look()
            assert not seen.ok
            assert "/v1/models" in seen.detail


@pytest.mark.parametrize("kind", [BackendKind.VLLM, BackendKind.SGLANG, BackendKind.OPENAI])
async def test_a_look_misses_a_model_that_is_gone(connect: Connect, kind: BackendKind) -> None:
    models = b'{"object": "list", "data": [{"id": "another"}]}'
    async with served(_answering(b"application/json", models)) as url:
        seen = await connect(url, kind).look()
    assert not seen.ok
    assert "does not serve the model 'scripted'; it serves: another" in seen.detail


async def test_a_look_samples_nothing(url: str, engine: ScriptedEngine, connect: Connect) -> None:
    assert (await connect(url).look()).ok
    assert engine.started == 0


@BOTH
async def test_what_a_server_says_of_itself_is_bounded(connect: Connect, kind: BackendKind) -> None:
    async with served(_answering(b"text/plain", b" " * 65536, chunks=10_000)) as url:
        seen = await connect(url, kind).health()
        assert not seen.ok
        assert seen.detail == f"{url}/health sent more than 1048576 bytes"
        with pytest.raises(InvalidInput, match="/v1/models sent more than 4194304 bytes"):
            await connect(url, kind).probe()


async def test_metrics_are_bounded_too(connect: Connect) -> None:
    whole = _answering(b"text/plain", b"ok")
    endless = _answering(b"text/plain", b" " * 65536, 10_000)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (endless if scope["path"] == "/metrics" else whole)(scope, receive, send)

    async with served(app) as url:
        seen = await connect(url).health()
    assert seen.detail == f"{url}/metrics sent more than 4194304 bytes"
