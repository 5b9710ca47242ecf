"""The routes of engines for LoRA adapters, for the scripted server: vLLM's (0.32) and SGLang's (0.5.23), from
their sources."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from rollserve.errors import InvalidInput
from rollserve.gateway.asgi import Receive, Scope, Send
from rollserve.testing.asgi import answer, send_body
from rollserve.testing.scripted_bodies import Adapter
from rollserve.testing.scripted_server import ScriptedApp
from rollserve.testing.scripted_sglang import SglangApp


def allow_adapters(app: ScriptedApp) -> list[tuple[str, str]]:
    """As ``VLLM_ALLOW_RUNTIME_LORA_UPDATING`` does; what is returned gets each adapter (name, path) that is
    loaded. Paths that hold ``missing`` are not there."""
    loaded: list[tuple[str, str]] = []
    adapters = app.engine.adapters

    async def load(scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        asked = msgspec.json.decode(body, type=Adapter)
        name, path = asked.lora_name, asked.lora_path
        if name == app.engine.model or name in adapters:
            await _refuse(send, 400, f"The lora adapter '{name}' has already been loaded.")
        elif "missing" in path:
            await _refuse(send, 404, f"No adapter found for {path}")
        else:
            adapters[name] = path
            loaded.append((name, path))
            await send_body(send, 200, b"Success")

    async def unload(scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        name = msgspec.json.decode(body, type=Adapter).lora_name
        if adapters.pop(name, None) is None:
            await _refuse(send, 404, f"The lora adapter '{name}' cannot be found.")
        else:
            await send_body(send, 200, b"Success")

    app.add_route("/v1/load_lora_adapter", load)
    app.add_route("/v1/unload_lora_adapter", unload)
    return loaded


async def _refuse(send: Send, status: int, message: str) -> None:
    await answer(send, status, {"error": {"message": message, "code": status}})


class SglangAdapters:
    """As ``--enable-lora`` does. ``loaded`` gets each adapter (name, path) that is loaded; paths that hold
    ``missing`` are not there. A name that is unloaded is gone at once, and the answer comes when its calls
    have ended; until then it can't be loaded. A call by such a name loads it as it was the last time."""

    def __init__(self, app: SglangApp) -> None:
        self.loaded: list[tuple[str, str]] = []
        self._names = app.engine.adapters
        self._last: dict[str, str] = {}
        self._calls = Counter[str]()
        self._ended = asyncio.Event()
        self._unloading: set[str] = set()
        app.use_adapter = self.use
        app.add_route("/load_lora_adapter", self._load)
        app.add_route("/unload_lora_adapter", self._unload)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        if name not in self._names:
            if name not in self._last:
                raise InvalidInput(f"Got LoRA adapter that has never been loaded: {name}")
            if why := self._take(name, self._last[name]):
                raise InvalidInput(f"Failed to implicitly load LoRA adapter {name}: {why}")
        self._calls[name] += 1
        try:
            yield
        finally:
            self._calls[name] -= 1
            self._ended.set()

    def _take(self, name: str, path: str) -> str:
        """Why not, or an empty text."""
        if name in self._unloading:
            return (
                f"LoRA adapter '{name}' has an incomplete unload. Retry the unload before loading it again."
            )
        if name in self._names:
            return f"Failed to load LoRA adapter {name} because it is already loaded"
        if "missing" in path:
            return f"[Errno 2] No such file or directory: '{path}/adapter_config.json'"
        self._names[name] = self._last[name] = path
        self.loaded.append((name, path))
        return ""

    async def _load(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        asked = msgspec.json.decode(body, type=Adapter)
        await self._told(send, self._take(asked.lora_name, asked.lora_path))

    async def _unload(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        name = msgspec.json.decode(body, type=Adapter).lora_name
        if name not in self._unloading and self._names.pop(name, None) is None:
            await self._told(send, f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self._names)}")
            return
        self._unloading.add(name)
        while self._calls[name]:
            self._ended.clear()
            await self._ended.wait()
        self._unloading.discard(name)
        await self._told(send, "")

    async def _told(self, send: Send, why: str) -> None:
        body = {"success": not why, "error_message": why or None, "loaded_adapters": dict(self._names)}
        await answer(send, 400 if why else 200, body)
