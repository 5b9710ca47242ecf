"""A policy served as a LoRA adapter by its name: registered, loaded, updated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollserve.backend.base import Backend, GenerateRequest
from rollserve.backend.control import Control
from rollserve.backend.engine_control import make_control
from rollserve.backend.registry import make_backend
from rollserve.errors import BackendError, CannotScore, InvalidInput
from rollserve.records.policy import BackendKind, BackendSpec
from rollserve.records.update import UpdateMode
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_adapters import allow_adapters
from rollserve.testing.scripted_server import ScriptedApp

Connect = Callable[..., Backend]


@pytest.fixture
def loaded(app: ScriptedApp) -> list[tuple[str, str]]:
    return allow_adapters(app)


@pytest.fixture
async def control(url: str) -> AsyncIterator[Control]:
    made = make_control(BackendSpec(url=url), "another policy", "lora")
    yield made
    await made.close()


async def test_an_adapter_is_known_by_the_listing(
    engine: ScriptedEngine, url: str, connect: Connect, ask: Callable[..., GenerateRequest]
) -> None:
    engine.adapters["lora"] = "/adapters/1"
    backend = connect(url, model="lora")
    info = await backend.probe()
    assert (info.adapter_of, info.models[0], info.context_tokens) == ("scripted", "lora", 256)
    assert not info.reports_versions  # the server's label is of its whole model
    assert (await backend.generate(ask(model="lora"))).token_ids
    for name in ("lora", "scripted"):
        with pytest.raises(CannotScore, match="beside adapters"):
            await connect(url, model=name).score([1, 2, 3], model=name)
    whole = await connect(url).probe()
    assert (whole.adapter_of, whole.reports_versions) == (None, True)


async def test_a_probe_loads_what_is_not_listed(
    loaded: list[tuple[str, str]], url: str, connect: Any
) -> None:
    for _ in range(2):
        info = await connect(url, model="lora", adapter_path="/adapters/1").probe()
        assert info.adapter_of == "scripted"
    assert loaded == [("lora", "/adapters/1")]
    with pytest.raises(InvalidInput, match="No adapter found") as caught:
        await connect(url, model="other", adapter_path="/missing").probe()
    assert caught.value.field == "options.adapter_path"


async def test_a_server_that_loads_none_says_what_to_do(url: str, connect: Any) -> None:
    with pytest.raises(InvalidInput, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING") as caught:
        await connect(url, model="lora", adapter_path="/adapters/1").probe()
    assert caught.value.field == "options.adapter_path"


@pytest.mark.parametrize(
    ("kind", "path", "says"),
    [
        (BackendKind.OPENAI, "/a", "loads no adapters"),
        (BackendKind.SGLANG, "", "path"),
        (BackendKind.VLLM, "", "path"),
        (BackendKind.VLLM, 3, "3"),
    ],
)
def test_no_path(kind: BackendKind, path: object, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        make_backend(BackendSpec(url="http://a", kind=kind, options={"adapter_path": path}), "lora")
    assert caught.value.field == "options.adapter_path"


async def test_an_update_loads_it_anew_and_pauses_nothing(
    control: Control, engine: ScriptedEngine, loaded: list[tuple[str, str]]
) -> None:
    engine.adapters |= {"lora": "/adapters/1", "other": "/o"}
    assert not control.waits
    for mode in UpdateMode:
        assert await control.check(mode) == ""
        await control.pause(mode, 5.0)
        assert engine.paused is None
    for _ in range(2):  # a commit that is sent again
        await control.announce("step-8", "/adapters/2")
    await control.announce("step-9")
    await control.resume()
    assert engine.adapters == {"lora": "/adapters/2", "other": "/o"}
    assert loaded == [("lora", "/adapters/2")] * 2
    assert (engine.label, engine.resets) == ("step-7", 0)
    with pytest.raises(BackendError, match="No adapter found"):
        await control.announce("step-9", "/missing")
