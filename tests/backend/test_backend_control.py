"""Pausing, labelling and resuming engines, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rollserve.backend.base import Backend, GenerateRequest
from rollserve.backend.control import Control
from rollserve.backend.engine_control import make_control
from rollserve.errors import BackendUnavailable, InvalidInput
from rollserve.records.policy import BackendKind, BackendSpec
from rollserve.records.update import UpdateMode
from rollserve.testing.asgi import Receive, Scope, Send, answer
from rollserve.testing.scripted import Reply, ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.testing.scripted_sglang import SglangApp

Ask = Callable[..., GenerateRequest]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]
Connect = Callable[..., Backend]


@pytest.fixture
async def control(url: str) -> AsyncIterator[Control]:
    made = make_control(BackendSpec(url=url))
    yield made
    await made.close()


@pytest.fixture
def talkative(engine: ScriptedEngine) -> ScriptedEngine:
    engine.script = lambda prompt: Reply(token_ids=(*range(10, 20), 2))
    engine.chunk_tokens = 1
    return engine


async def until_sampling(engine: ScriptedEngine, eventually: Eventually) -> None:
    await eventually(lambda: engine.generated_tokens >= 2)


async def test_keep_freezes_what_runs_and_it_goes_on_under_the_new_label(
    control: Control, talkative: ScriptedEngine, url: str, connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    talkative.latency_s = 0.3
    call = asyncio.create_task(connect(url).generate(ask()))
    await until_sampling(talkative, eventually)
    talkative.gate.clear()  # it does not end before it is paused
    assert await control.check(UpdateMode.KEEP) == ""
    await control.pause(UpdateMode.KEEP, 5.0)
    talkative.gate.set()
    made = talkative.generated_tokens
    await asyncio.sleep(0.1)
    assert talkative.generated_tokens <= made + 1
    await control.announce("step-8")
    await control.resume()
    generation = await call
    assert generation.finish_reason == "stop"
    assert generation.labels is not None
    assert [span.label for span in generation.labels] == ["step-7", "step-8"]
    assert talkative.resets == 1


async def test_abort_ends_what_runs_with_what_it_had(
    control: Control, talkative: ScriptedEngine, url: str, connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    talkative.latency_s = 0.3
    call = asyncio.create_task(connect(url).generate(ask()))
    await until_sampling(talkative, eventually)
    talkative.gate.clear()  # it does not end by itself
    await control.pause(UpdateMode.ABORT, 5.0)
    generation = await call
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.token_ids) < 11


async def test_drain_waits_for_what_runs_and_holds_what_comes(
    control: Control, talkative: ScriptedEngine, url: str, connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    talkative.latency_s = 0.2
    first = asyncio.create_task(connect(url).generate(ask("r1")))
    await until_sampling(talkative, eventually)
    await control.pause(UpdateMode.DRAIN, 5.0)
    assert (await first).finish_reason == "stop"
    second = asyncio.create_task(connect(url).generate(ask("r2")))
    await eventually(lambda: "r2" in talkative.running)
    await asyncio.sleep(0.05)
    assert not second.done()
    await control.resume()
    assert (await second).finish_reason == "stop"


async def test_missing_routes_are_said_before_anything_is_paused(app: ScriptedApp, control: Control) -> None:
    async def closed(scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        await answer(send, 404, {"detail": "Not Found"})

    app.add_route("/is_paused", closed)
    with pytest.raises(InvalidInput, match="has no route /is_paused") as error:
        await control.check(UpdateMode.DRAIN)
    assert error.value.field == "backends"
    assert error.value.hint == "start vLLM with VLLM_SERVER_DEV_MODE=1"


async def test_one_that_is_not_there(closed_port: int) -> None:
    control = make_control(BackendSpec(url=f"http://127.0.0.1:{closed_port}"))
    with pytest.raises(BackendUnavailable):
        await control.check(UpdateMode.DRAIN)
    await control.close()


@pytest.mark.parametrize("kind", [BackendKind.OPENAI, BackendKind.CHAT, BackendKind.TEXT])
async def test_a_kind_that_cant_be_paused_says_so(url: str, kind: BackendKind) -> None:
    control = make_control(BackendSpec(url=url, kind=kind))
    assert "is not paused" in await control.check(UpdateMode.ABORT)
    with pytest.raises(InvalidInput, match="can't stand still") as error:
        await control.check(UpdateMode.KEEP)
    assert error.value.field == "mode"
    assert not control.waits
    await control.close()


async def test_a_server_of_two_policies_is_not_paused_for_one(url: str, engine: ScriptedEngine) -> None:
    control = make_control(BackendSpec(url=url), "judge")
    assert "'judge'" in await control.check(UpdateMode.DRAIN)
    await control.pause(UpdateMode.DRAIN, 1.0)
    assert engine.paused is None
    await control.announce("x")
    assert engine.label == "step-7"
    await control.close()


# ── SGLang


@pytest.fixture
async def sglang(engine: ScriptedEngine) -> AsyncIterator[tuple[SglangApp, str]]:
    app = SglangApp(engine)
    async with serving(app) as address:
        yield app, address


@pytest.mark.parametrize(
    ("mode", "theirs"),
    [(UpdateMode.DRAIN, "in_place"), (UpdateMode.ABORT, "abort"), (UpdateMode.KEEP, "retract")],
)
async def test_sglang_is_paused_in_its_own_words(
    sglang: tuple[SglangApp, str], mode: UpdateMode, theirs: str
) -> None:
    app, url = sglang
    control = make_control(BackendSpec(url=url, kind=BackendKind.SGLANG))
    assert await control.check(mode) == ""
    assert app.pauses == [], "a check pauses nothing"
    await control.pause(mode, 5.0)
    await control.announce("step-9")
    await control.resume()
    await control.close()
    assert app.pauses == [theirs]
    assert (app.engine.label, app.engine.resets, app.engine.paused) == ("step-9", 1, None)


async def test_sglangs_label_does_not_abort_what_stands_still(
    sglang: tuple[SglangApp, str], connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    app, url = sglang
    app.engine.script = lambda prompt: Reply(token_ids=(*range(10, 20), 2))
    app.engine.chunk_tokens, app.engine.latency_s = 1, 0.3
    call = asyncio.create_task(connect(url, kind=BackendKind.SGLANG).generate(ask()))
    await until_sampling(app.engine, eventually)
    control = make_control(BackendSpec(url=url, kind=BackendKind.SGLANG))
    await control.pause(UpdateMode.KEEP, 5.0)
    await control.announce("step-8")
    await control.resume()
    await control.close()
    generation = await call
    assert generation.finish_reason == "stop"
    assert generation.labels is not None
    assert [span.label for span in generation.labels] == ["step-7", "step-8"]
