"""What can be wrong with a server, and which error says so; on both adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollserve.backend.base import Backend, GenerateRequest
from rollserve.backend.http import Http
from rollserve.backend.vllm import VllmBackend
from rollserve.errors import BackendError, BackendUnavailable, ContextTooLong, InvalidInput, UnknownName
from rollserve.records.policy import BackendKind
from rollserve.testing.asgi import Receive, Scope, Send, served
from rollserve.testing.scripted import Fault, Reply, ScriptedEngine, replies
from rollserve.testing.scripted_server import ScriptedApp, serving

Connect = Callable[..., Backend]
Ask = Callable[..., GenerateRequest]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]
BOTH = pytest.mark.parametrize("kind", [BackendKind.VLLM, BackendKind.OPENAI])
HTML = b"<!DOCTYPE html><html><head><title>Welcome to nginx!</title></head></html>"


# ── generate


@BOTH
async def test_server_error(
    url: str, engine: ScriptedEngine, connect: Connect, ask: Ask, kind: BackendKind
) -> None:
    engine.faults.append(Fault(kind="status", status=500, message="CUDA error"))
    with pytest.raises(BackendError, match=r"500.*CUDA error") as caught:
        await connect(url, kind).generate(ask())
    assert not isinstance(caught.value, BackendUnavailable)


@BOTH
async def test_busy_says_when_to_come_back(
    url: str, engine: ScriptedEngine, connect: Connect, ask: Ask, kind: BackendKind
) -> None:
    engine.faults.append(Fault(kind="status", status=429, message="queue full", retry_after_s=7))
    with pytest.raises(BackendUnavailable, match="queue full") as caught:
        await connect(url, kind).generate(ask())
    assert caught.value.retry_after_s == 7


async def test_busy_without_a_time_has_a_default(
    url: str, engine: ScriptedEngine, connect: Connect, ask: Ask
) -> None:
    engine.faults.append(Fault(kind="status", status=429))
    with pytest.raises(BackendUnavailable) as caught:
        await connect(url).generate(ask())
    assert caught.value.retry_after_s is not None


@BOTH
async def test_not_serving(
    url: str, engine: ScriptedEngine, connect: Connect, ask: Ask, kind: BackendKind
) -> None:
    engine.faults.append(Fault(kind="status", status=503, message="sleeping"))
    with pytest.raises(BackendUnavailable, match="sleeping") as caught:
        await connect(url, kind).generate(ask())
    assert caught.value.retry_after_s is None


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_connection_breaks_off(
    url: str, engine: ScriptedEngine, connect: Connect, ask: Ask, kind: BackendKind, stream: bool
) -> None:
    engine.chunk_tokens = 1
    engine.faults.append(Fault(kind="drop", after_tokens=3))
    got: list[int] = []
    sink = (lambda ids, logprobs: got.extend(ids)) if stream else None
    with pytest.raises(BackendUnavailable, match=r"broke off|ended before"):
        await connect(url, kind).generate(ask(), sink)
    assert len(got) == (3 if stream else 0)


@BOTH
async def test_nothing_listens(closed_port: int, connect: Connect, ask: Ask, kind: BackendKind) -> None:
    backend = connect(f"http://127.0.0.1:{closed_port}", kind)
    with pytest.raises(BackendUnavailable, match=r"(?i)connect"):
        await backend.generate(ask())
    health = await backend.health()
    assert not health.ok
    assert "onnect" in health.detail


@BOTH
async def test_html_instead_of_a_generation(
    url: str, engine: ScriptedEngine, connect: Connect, ask: Ask, kind: BackendKind
) -> None:
    engine.faults.append(Fault(kind="status", status=200, content_type="text/html", body=HTML))
    with pytest.raises(BackendError, match="is not a"):
        await connect(url, kind).generate(ask())
    engine.faults.append(Fault(kind="status", status=502, content_type="text/html", body=HTML))
    with pytest.raises(BackendUnavailable, match="Welcome to nginx"):
        await connect(url, kind).generate(ask())


@BOTH
async def test_prompt_too_long(
    url: str, engine: ScriptedEngine, connect: Connect, ask: Ask, kind: BackendKind
) -> None:
    with pytest.raises(ContextTooLong, match="maximum context length") as caught:
        await connect(url, kind).generate(ask(token_ids=[3] * engine.context_tokens))
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_an_answer_without_end_is_cut_off(ask: Ask, kind: str) -> None:
    async def app(scope: dict[str, object], receive: object, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]}
        )
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": b" " * 65536, "more_body": True})

    async with served(app) as url, asyncio.timeout(20):
        http = Http(url, max_answer_bytes=1 << 20)
        try:
            with pytest.raises(BackendError, match=r"sent more than 1048576 bytes$"):
                await VllmBackend(http, "scripted").generate(ask(), lambda ids, logprobs: None)
        finally:
            await http.close()


async def test_hangs_and_is_cancelled(
    url: str, app: ScriptedApp, connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    app.engine.faults.append(Fault(kind="hang"))
    task = asyncio.create_task(connect(url).generate(ask("stuck")))
    async with asyncio.timeout(20):
        await eventually(lambda: "stuck" in app.engine.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: not app.engine.running)
    assert app.engine.aborted == 1


async def test_cancel_is_passed_on_only_when_the_abort_was_answered(
    connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    """A second cancel while the abort is under way does not cut it short."""
    engine = ScriptedEngine()
    engine.gate.clear()
    asked, answer = asyncio.Event(), asyncio.Event()
    inner = ScriptedApp(engine)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/inference/v1/abort_requests":
            asked.set()
            await answer.wait()
        await inner(scope, receive, send)

    async with served(app) as url, asyncio.timeout(20):
        task = asyncio.create_task(connect(url).generate(ask("r9")))
        await eventually(lambda: engine.running)
        task.cancel()
        await asked.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        answer.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.gate.set()


async def test_a_dead_server_does_not_hold_up_a_cancel(
    connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    async with asyncio.timeout(20):
        async with serving(ScriptedApp(engine)) as url:
            backend = connect(url)
            task = asyncio.create_task(backend.generate(ask()))
            await eventually(lambda: engine.running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(BackendUnavailable):
            await backend.generate(ask())


# ── probe


@BOTH
async def test_probe_of_a_closed_port(closed_port: int, connect: Connect, kind: BackendKind) -> None:
    with pytest.raises(InvalidInput, match="no inference server") as caught:
        await connect(f"http://127.0.0.1:{closed_port}", kind).probe()
    assert caught.value.field == "url"
    assert "Is it up" in str(caught.value.hint)


@BOTH
async def test_probe_of_a_web_page(connect: Connect, kind: BackendKind) -> None:
    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/html")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": HTML})

    async with served(page) as url:
        with pytest.raises(InvalidInput, match="an HTML page 'Welcome to nginx!'") as caught:
            await connect(url, kind).probe()
    assert caught.value.field == "url"


@BOTH
@pytest.mark.parametrize(("status", "code"), [(404, "not_found"), (401, "unauthenticated")])
async def test_probe_of_a_rollserve_server(
    connect: Connect, kind: BackendKind, status: int, code: str
) -> None:
    async def problem(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/problem+json")]
        body = b'{"type": "about:blank", "status": %d, "code": "%s"}' % (status, code.encode())
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async with served(problem) as url:
        with pytest.raises(InvalidInput, match="is a rollserve server") as caught:
            await connect(url, kind).probe()
    assert caught.value.field == "url"
    assert "--enable-scale-out" in str(caught.value.hint)


@BOTH
async def test_probe_of_another_api(connect: Connect, kind: BackendKind) -> None:
    async def api(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"hello": "world"}'})

    async with served(api) as url:
        with pytest.raises(InvalidInput, match="hello") as caught:
            await connect(url, kind).probe()
    assert caught.value.field == "url"


@BOTH
async def test_probe_of_what_is_not_http(connect: Connect, kind: BackendKind) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(InvalidInput) as caught:
            await connect(f"http://127.0.0.1:{port}", kind).probe()
    assert caught.value.field == "url"


@BOTH
async def test_probe_names_what_is_served(url: str, connect: Connect, kind: BackendKind) -> None:
    with pytest.raises(InvalidInput, match=r"it serves: scripted.*did you mean 'scripted'") as caught:
        await connect(url, kind, model="scriptde").probe()
    assert caught.value.field == "model"


async def test_probe_names_the_missing_flag(url: str, app: ScriptedApp, connect: Connect) -> None:
    app.generate_open = False
    with pytest.raises(InvalidInput, match="--enable-scale-out") as caught:
        await connect(url).probe()
    assert caught.value.field == "url"


@BOTH
async def test_probe_finds_raw_logprobs(
    url: str, engine: ScriptedEngine, connect: Connect, kind: BackendKind
) -> None:
    good = await connect(url, kind).probe()
    assert good.logprobs_mode == "processed"
    engine.logprobs_mode = "raw"
    info = await connect(url, kind).probe()
    assert info.logprobs_mode == "raw"
    assert any("--logprobs-mode processed_logprobs" in warning for warning in info.warnings)


async def test_probe_finds_versions(url: str, engine: ScriptedEngine, connect: Connect) -> None:
    info = await connect(url).probe()
    assert info.reports_versions
    assert info.warnings == []
    assert info.engine == "rollserve-scripted"
    assert info.context_tokens == 256
    engine.label = None
    info = await connect(url).probe()
    assert not info.reports_versions
    assert any("no weight versions" in warning for warning in info.warnings)


async def test_openai_probe_refuses_text_without_ids(connect: Connect) -> None:
    inner = ScriptedApp(ScriptedEngine())
    text_only = b'{"choices":[{"index":0,"text":"hi","finish_reason":"stop","logprobs":{"tokens":["hi"],'
    text_only += b'"token_logprobs":[-0.5]}}]}'

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/v1/completions":
            await inner(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text_only})

    async with served(app) as url:
        with pytest.raises(InvalidInput, match=r"text and no token ids.*return_token_ids") as caught:
            await connect(url, BackendKind.OPENAI).probe()
    assert caught.value.field == "url"


@pytest.mark.parametrize("url", ["ftp://host", "not a url", "http://", "http://[::1", "localhost:8000"])
def test_unusable_urls(url: str, connect: Connect) -> None:
    with pytest.raises(InvalidInput) as caught:
        connect(url)
    assert caught.value.field == "url"


def test_options_are_checked(connect: Connect) -> None:
    with pytest.raises(UnknownName, match="control_timeout_s"):
        connect("http://localhost:1", control_timeout=3)
    with pytest.raises(InvalidInput, match=r"options.connect_timeout_s"):
        connect("http://localhost:1", connect_timeout_s=-1)


# ── what is sent and read


async def test_what_shapes_the_distribution_is_always_sent(
    url: str, engine: ScriptedEngine, connect: Connect, ask: Ask
) -> None:
    await connect(url).generate(ask("r7", temperature=0.7, top_p=0.9, top_k=40, seed=11, max_tokens=5))
    sampling = engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 40)
    assert (sampling.seed, sampling.max_tokens) == (11, 5)
    assert engine.seen[-1].request_id == "r7"


async def test_labels_change_in_the_middle(connect: Connect, ask: Ask) -> None:
    engine = ScriptedEngine(replies(Reply(token_ids=(9, 8, 7, 6, 2))), chunk_tokens=1, label="a")
    seen: list[int] = []

    def sink(ids: list[int], logprobs: list[float]) -> None:
        seen.extend(ids)
        if len(seen) == 2:
            engine.label = "b"

    async with serving(ScriptedApp(engine)) as url:
        made = await connect(url).generate(ask(), sink)
    assert made.labels is not None
    assert [span.label for span in made.labels] == ["a", "b"]
    assert made.labels[0].start == 0
    assert made.labels[-1].end == 5


async def test_a_failing_sink_is_the_callers_error_and_stops_the_server(
    url: str, app: ScriptedApp, connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    app.engine.chunk_tokens = 1
    app.engine.latency_s = 20.0

    def sink(ids: list[int], logprobs: list[float]) -> None:
        raise ConnectionResetError("the agent has gone")

    app.engine.script = replies(Reply(token_ids=tuple(range(3, 203))))
    with pytest.raises(ConnectionResetError):
        await connect(url).generate(ask(max_tokens=200), sink)
    async with asyncio.timeout(20):
        await eventually(lambda: not app.engine.running)
    assert app.engine.aborted == 1
