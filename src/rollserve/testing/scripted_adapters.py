"""vLLM's routes for LoRA adapters (0.32, from its source), for the scripted server."""

from __future__ import annotations

import msgspec

from rollserve.gateway.asgi import Receive, Scope, Send
from rollserve.testing.scripted_bodies import Adapter
from rollserve.testing.scripted_server import ScriptedApp, answer, send_body


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
