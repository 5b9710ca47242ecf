"""The scripted server of the bench: the right reply for each turn, cheap ones equal to those of the
engine, and the pool over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from rollserve.backend.base import Backend, GenerateRequest
from rollserve.backend.http import Http
from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.backend.registry import make_backend
from rollserve.backend.vllm import VllmBackend
from rollserve.records import policy
from rollserve.records.policy import BackendInfo, BackendKind, BackendSpec
from rollserve.testing.asgi import served
from rollserve.testing.scripted import ScriptedBackend, ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.testing.scripted_turns import episode
from rollserve.tiny_tokenizer import TinyTokenizer

Connect = Callable[..., Backend]
Ask = Callable[..., GenerateRequest]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]


def context(tokenizer: TinyTokenizer, turns: list[list[int]]) -> list[int]:
    """A conversation after these replies, asking for the next."""
    ids = tokenizer.encode("<|im_start|>user\ndo it<|im_end|>\n<|im_start|>assistant\n")
    for reply in turns:
        ids += reply
        ids += tokenizer.encode("\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n")
        ids += tokenizer.encode("<|im_start|>assistant\n")
    return ids


@pytest.mark.parametrize("stream", [False, True])
async def test_an_episode_of_tool_calls(connect: Connect, ask: Ask, stream: bool) -> None:
    tokenizer = TinyTokenizer()
    turns = episode(turns=3, tokens=40, tool="echo", arguments='{"text": "hi"}', final_text="that is all")
    engine = ScriptedEngine()
    replies: list[list[int]] = []
    async with serving(ScriptedApp(engine, turns)) as url:
        backend = connect(url)
        for _ in range(4):
            request = ask(f"r{len(replies)}", context(tokenizer, replies), max_tokens=100)
            made = await backend.generate(request, (lambda ids, logprobs: None) if stream else None)
            assert made.prompt_ids == request.token_ids
            assert made.finish_reason == "stop"
            assert made.labels is not None
            assert len(made.token_ids) == pytest.approx(40, abs=25)
            replies.append(made.token_ids)
    texts = [tokenizer.decode(reply) for reply in replies]
    for text in texts[:2]:
        call = text.split("<tool_call>\n")[1].split("\n</tool_call>")[0]
        assert json.loads(call) == {"name": "echo", "arguments": {"text": "hi"}}
    assert all("that is all" in text and "<tool_call>" not in text for text in texts[2:])
    assert all(text.endswith("<|im_end|>") for text in texts)


async def test_the_prepared_answer_is_the_engines(connect: Connect, ask: Ask) -> None:
    tokenizer = TinyTokenizer()
    turns = episode(turns=2, tokens=30, tool="shell", arguments='{"command": "true"}')
    async with serving(ScriptedApp(ScriptedEngine(), turns)) as url:
        backend = connect(url)
        request = ask("r0", context(tokenizer, []), max_tokens=100)
        prepared = await backend.generate(request)
        run = await backend.generate(msgspec.structs.replace(request, request_id="r1"), lambda *_: None)
    assert prepared == run


async def test_max_tokens_cuts_a_prepared_answer(connect: Connect, ask: Ask) -> None:
    turns = episode(turns=2, tokens=30, tool="shell", arguments="{}")
    async with serving(ScriptedApp(ScriptedEngine(), turns)) as url:
        made = await connect(url).generate(ask("r0", [5, 6], max_tokens=7))
    assert len(made.token_ids) == 7
    assert made.finish_reason == "length"


async def test_abort_and_cancel_of_a_prepared_answer(
    connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    engine = ScriptedEngine(latency_s=30.0)
    app = ScriptedApp(engine, episode(turns=2, tokens=30, tool="shell", arguments="{}"))
    async with serving(app) as url, asyncio.timeout(20):
        backend = connect(url)
        first = asyncio.create_task(backend.generate(ask("r0", [5, 6], max_tokens=100)))
        await eventually(lambda: engine.started == 1)
        await backend.abort(["r0"])
        assert (await first).finish_reason == "abort"
        second = asyncio.create_task(backend.generate(ask("r1", [5, 6], max_tokens=100)))
        await eventually(lambda: engine.started == 2)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await eventually(lambda: engine.aborted == 2)


async def test_control_routes(url: str, engine: ScriptedEngine) -> None:
    http = Http(url)
    await http.control("/update_weight_version", b'{"new_version": "step-9"}')
    stats = json.loads((await http.get("/stats")).body)
    missing = await http.get("/nothing")
    await http.close()
    assert engine.label == "step-9"
    assert stats["running"] == 0
    assert missing.status == 404


@pytest.mark.parametrize("counts", [True, False])
async def test_the_engines_own_count_of_tokens(url: str, engine: ScriptedEngine, counts: bool) -> None:
    engine.counts_tokens = counts
    engine.generated_tokens = 1234567
    for backend in (VllmBackend(Http(url), "scripted"), ScriptedBackend(engine)):
        health = await backend.health()
        assert health.ok
        assert health.generated_tokens == (1234567 if counts else None)
        await backend.close()


async def test_the_count_is_summed_over_engines() -> None:
    body = b"""# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:generation_tokens_total{engine="1",model_name="m"} 20.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""

    async def app(scope: dict[str, object], receive: object, send: Callable[..., Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async with served(app) as url:
        backend = VllmBackend(Http(url), "m")
        health = await backend.health()
        await backend.close()
    assert (health.generated_tokens, health.running, health.waiting) == (1500020, 2, None)


async def test_a_prepared_answer_under_way_counts(connect: Connect, ask: Ask, eventually: Eventually) -> None:
    engine = ScriptedEngine(latency_s=5.0)
    turns = episode(turns=2, tokens=500, tool="shell", arguments="{}")
    async with serving(ScriptedApp(engine, turns)) as url, asyncio.timeout(20):
        backend = connect(url)
        call = asyncio.create_task(backend.generate(ask("r0", [5, 6], max_tokens=1000)))
        await eventually(lambda: engine.started == 1)
        counts = [(await backend.health()).generated_tokens or 0]
        await asyncio.sleep(0.1)
        counts.append((await backend.health()).generated_tokens or 0)
        await backend.abort(["r0"])
        await call
    assert counts[0] < counts[1] < 500


# ── the pool, over real sockets


def record(name: str, url: str) -> policy.Backend:
    return policy.Backend(
        id=name,
        policy="p",
        spec=BackendSpec(url=url, kind=BackendKind.SCRIPTED),
        info=BackendInfo(engine="scripted", models=["scripted"]),
    )


async def test_a_backend_that_dies_and_returns(ask: Ask, closed_port: int) -> None:
    """Its calls are held while it is away, twice."""
    settings = PoolSettings(strikes_to_fail=2, probe_first_s=0.02, probe_max_s=0.05, wait_s=30.0)
    failed = asyncio.Event()
    pool = BackendPool(
        model="scripted",
        make=make_backend,
        settings=settings,
        on_report=lambda backend_id, ok, detail: failed.clear() if ok else failed.set(),
    )
    pool.update([record("a", f"http://127.0.0.1:{closed_port}")])
    async with asyncio.timeout(30):
        for number in range(2):
            call = asyncio.create_task(pool.generate("s", ask(f"r{number}")))
            await failed.wait()
            async with serving(ScriptedApp(ScriptedEngine()), closed_port):
                assert (await call).backend_id == "a"
                assert (await pool.generate("s", ask(f"q{number}"))).generation.token_ids
                assert pool.stats()["a"]["state"] == "ok"
        await pool.close()


async def test_removal_reaches_the_server(ask: Ask, eventually: Eventually) -> None:
    stuck, well = ScriptedEngine(), ScriptedEngine()
    stuck.gate.clear()
    async with (
        asyncio.timeout(30),
        serving(ScriptedApp(stuck)) as one,
        serving(ScriptedApp(well)) as two,
    ):
        pool = BackendPool(model="scripted", make=make_backend)
        pool.update([record("a", one)])
        calls = [asyncio.create_task(pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(5)]
        await eventually(lambda: len(stuck.running) == 5)
        pool.update([record("b", two)])
        assert {(await call).backend_id for call in calls} == {"b"}
        await eventually(lambda: stuck.aborted == 5)
        await pool.close()


async def test_450_at_once_over_sockets(ask: Ask, eventually: Eventually) -> None:
    """More than any default pool of connections."""
    engines = [ScriptedEngine(latency_s=0.01) for _ in range(3)]
    for engine in engines:
        engine.gate.clear()
    async with (
        asyncio.timeout(60),
        serving(ScriptedApp(engines[0])) as one,
        serving(ScriptedApp(engines[1])) as two,
        serving(ScriptedApp(engines[2])) as three,
    ):
        unbounded = PoolSettings(concurrency="off")
        pool = BackendPool(model="scripted", make=make_backend, settings=unbounded)
        pool.update([record(name, url) for name, url in zip("abc", (one, two, three), strict=True)])
        calls = [asyncio.create_task(pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(450)]
        await eventually(lambda: sum(len(engine.running) for engine in engines) == 450)
        assert [len(engine.running) for engine in engines] == [150, 150, 150]
        for engine in engines:
            engine.gate.set()
        done = await asyncio.gather(*calls)
        await pool.close()
    assert len({routed.backend_id for routed in done}) == 3
