"""Tokenizers are looked for in a process of its own, and the hub is asked once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from rollserve.build.probes import check_tokenizer
from rollserve.errors import InvalidInput
from rollserve.tiny_tokenizer import tokenizer_file


@dataclass
class Hub:
    """Speaks as the Hugging Face hub does where a tokenizer is asked for, or answers ``ill``."""

    models: dict[str, bytes] = field(default_factory=dict)
    ill: int | None = None
    silent: bool = False
    asked: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "/resolve/" not in request.path:  # the library's own business
            return web.Response(status=404)
        self.asked.append(f"{request.method} {request.path}")
        if self.silent:
            await asyncio.sleep(60)
        if self.ill is not None:
            return web.Response(status=self.ill)
        name, _, file = request.path.strip("/").partition("/resolve/main/")
        if name not in self.models:
            return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        headers = {"X-Repo-Commit": "c" * 40, "ETag": f'"{name.replace("/", "-")}"'}
        if file != "tokenizer.json":
            return web.Response(status=404, headers={**headers, "X-Error-Code": "EntryNotFound"})
        return web.Response(body=self.models[name], headers=headers)


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    made = Hub()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{runner.addresses[0][1]}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield made
    await runner.cleanup()


async def refused(name: str) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        await check_tokenizer(name)
    assert caught.value.field == "tokenizer"
    return caught.value


async def test_one_that_the_hub_has_is_taken_also_from_the_cache_afterwards(hub: Hub) -> None:
    hub.models["org/model"] = tokenizer_file().read_bytes()
    await check_tokenizer("org/model")
    hub.ill = 503
    hub.asked.clear()
    await check_tokenizer("org/model")
    assert len(hub.asked) == 1


async def test_a_hub_that_can_not_be_asked_is_asked_once(hub: Hub) -> None:
    hub.ill = 503
    error = await refused("org/model")
    assert hub.asked == ["HEAD /org/model/resolve/main/tokenizer.json"]
    assert "503" in error.message
    assert "hf download org/model" in str(error.hint)
    assert "HF_HUB_OFFLINE" in str(error.hint)


async def test_a_name_that_the_hub_has_not(hub: Hub) -> None:
    error = await refused("org/modle")
    assert "no model of that name on the hub" in error.message
    assert len(hub.asked) == 1


async def test_what_is_no_tokenizer_is_told_whoever_has_it(hub: Hub, tmp_path: Path) -> None:
    hub.models["org/model"] = b"{}"
    assert "no tokenizer.json" in (await refused("org/model")).message
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "no tokenizer.json" in (await refused(str(tmp_path))).message


async def test_offline_the_hub_is_not_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in (await refused("org/model")).message
    assert hub.asked == []


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "~/models"])
async def test_a_path_is_not_asked_for(hub: Hub, name: str) -> None:
    error = await refused(name)
    assert f"no such file or directory: {name}" in error.message
    assert "tokenizer.json" in str(error.hint)
    assert hub.asked == []


async def test_a_hub_that_says_nothing_is_not_waited_for(hub: Hub) -> None:
    hub.silent = True
    with pytest.raises(InvalidInput, match=r"could not be loaded within 3 s"):
        await check_tokenizer("org/model", within_s=3)
