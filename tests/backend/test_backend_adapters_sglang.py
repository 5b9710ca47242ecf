"""SGLang's adapters, on a fake that follows its source; the real server was never asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from rollserve.backend.base import Backend, GenerateRequest
from rollserve.backend.control import Control
from rollserve.backend.engine_control import make_control
from rollserve.errors import BackendError, InvalidInput
from rollserve.records.policy import BackendKind, BackendSpec
from rollserve.records.update import UpdateMode
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_adapters import SglangAdapters
from rollserve.testing.scripted_server import serving
from rollserve.testing.scripted_sglang import SglangApp

Connect = Callable[..., Backend]
Ask = Callable[..., GenerateRequest]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]
SGLANG = BackendKind.SGLANG


@dataclass
class Served:
    app: SglangApp
    adapters: SglangAdapters
    url: str

    @property
    def asked(self) -> list[str | None]:
        """Which adapters the calls wanted."""
        return [body.lora_path for body in self.app.asked]


@pytest.fixture
async def served(engine: ScriptedEngine) -> AsyncIterator[Served]:
    app = SglangApp(engine)
    adapters = SglangAdapters(app)
    async with serving(app) as url:
        yield Served(app, adapters, url)


@pytest.fixture
async def control(served: Served) -> AsyncIterator[Control]:
    made = make_control(BackendSpec(url=served.url, kind=SGLANG), "another policy", "lora")
    yield made
    await made.close()


async def test_a_probe_loads_it_and_every_call_wants_it(served: Served, connect: Connect, ask: Ask) -> None:
    backend = connect(served.url, SGLANG, model="lora", adapter_path="/adapters/1")
    for _ in range(2):
        info = await backend.probe()
        assert (info.adapter_of, info.models[0], info.context_tokens) == ("scripted", "lora", 255)
        assert not info.reports_versions  # the server's label is of its whole model
    assert served.adapters.loaded == [("lora", "/adapters/1")]
    assert (await backend.generate(ask(model="lora"))).token_ids
    assert await backend.score([1, 2, 3], model="lora")
    assert set(served.asked) == {"lora"}
    before = len(served.asked)
    whole = connect(served.url, SGLANG)
    assert (await whole.probe()).adapter_of is None
    assert (await whole.generate(ask())).token_ids
    assert set(served.asked[before:]) == {None}


async def test_what_a_probe_refuses(served: Served, connect: Connect, engine: ScriptedEngine) -> None:
    engine.adapters["theirs"] = "/theirs"

    async def refusal(model: str, **options: object) -> str:
        with pytest.raises(InvalidInput) as caught:
            await connect(served.url, SGLANG, model=model, **options).probe()
        assert caught.value.field == "options.adapter_path"
        return caught.value.message

    assert "is an adapter of 'scripted'" in await refusal("theirs")
    assert "is the whole model" in await refusal("scripted", adapter_path="/a")
    assert "No such file or directory: '/missing" in await refusal("lora", adapter_path="/missing")
    assert (await connect(served.url, SGLANG, model="theirs", adapter_path="/theirs").probe()).adapter_of


async def test_a_server_without_adapters_says_what_to_do(engine: ScriptedEngine, connect: Connect) -> None:
    async with serving(SglangApp(engine)) as url:
        with pytest.raises(InvalidInput) as caught:
            await connect(url, SGLANG, model="lora", adapter_path="/a").probe()
    assert "--enable-lora" in (caught.value.hint or "")


async def test_an_update_loads_it_anew_and_pauses_nothing(served: Served, control: Control) -> None:
    engine = served.app.engine
    engine.adapters |= {"lora": "/adapters/1", "other": "/o"}
    assert not control.waits
    assert [await control.check(mode) for mode in (UpdateMode.DRAIN, UpdateMode.ABORT)] == ["", ""]
    assert "waits for them" in await control.check(UpdateMode.KEEP)
    for mode in UpdateMode:
        await control.pause(mode, 5.0)
        await control.resume()
    for _ in range(2):  # a commit that is sent again
        await control.announce("step-8", "/adapters/2")
    await control.announce("step-9")
    assert engine.adapters == {"lora": "/adapters/2", "other": "/o"}
    assert served.adapters.loaded == [("lora", "/adapters/2")] * 2
    assert (engine.label, engine.resets, engine.paused, served.app.pauses) == ("step-7", 0, None, [])


async def test_a_call_that_is_kept_ends_first_with_what_it_began_with(
    served: Served, control: Control, connect: Connect, ask: Ask, eventually: Eventually
) -> None:
    engine = served.app.engine
    backend = connect(served.url, SGLANG, model="lora", adapter_path="/adapters/1")
    await backend.probe()
    engine.gate.clear()
    kept = asyncio.create_task(backend.generate(ask("kept", model="lora")))
    await eventually(lambda: len(engine.running) == 1)
    announced = asyncio.create_task(control.announce("8", "/adapters/2"))
    await eventually(lambda: "lora" not in engine.adapters)
    assert served.adapters.loaded == [("lora", "/adapters/1")]
    with pytest.raises(InvalidInput, match="incomplete unload"):
        served.adapters.use("lora").__enter__()
    engine.gate.set()
    assert (await kept).token_ids
    await announced
    assert served.adapters.loaded == [("lora", "/adapters/1"), ("lora", "/adapters/2")]


async def test_an_adapter_that_can_not_be_loaded_leaves_the_old_one(
    served: Served, control: Control, connect: Connect, ask: Ask
) -> None:
    backend = connect(served.url, SGLANG, model="lora", adapter_path="/adapters/1")
    await backend.probe()
    with pytest.raises(BackendError, match="No such file"):
        await control.announce("8", "/missing")
    assert (await backend.generate(ask(model="lora"))).token_ids
    assert served.app.engine.adapters == {"lora": "/adapters/1"}
