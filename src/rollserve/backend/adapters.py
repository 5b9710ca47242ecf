"""LoRA adapters of a vLLM (0.32) that serves a policy under an adapter's name.

A new version is unloaded and loaded under the same name: calls that run keep the adapter they began with, and
new ones get the new. (``load_inplace`` would be one request, but from then on that server reads the adapter
from disk again for later calls, and ends when it is not there.) Needs ``--enable-lora`` and
``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
"""

from __future__ import annotations

import msgspec

from rollserve.backend.http import Answer, Http
from rollserve.backend.refusals import refusal
from rollserve.errors import RollserveError
from rollserve.records.update import UpdateMode

LOAD_S = 300.0
"""Of one adapter: it is read from a disk."""

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_OPERATION = "backend.adapter"
_HINT = (
    "is the path there, as the server sees it? Was vLLM started with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1?"
)


async def load_adapter(http: Http, name: str, path: str) -> None:
    """``path`` is as the server sees it. Raises ``BackendError``, ``BackendUnavailable``."""
    answer = await _post(http, _LOAD, {"lora_name": name, "lora_path": path})
    if answer.status >= 300:
        raise _refused(answer)


async def replace_adapter(http: Http, name: str, path: str) -> None:
    """The same again is harmless. Raises as ``load_adapter``; the name is served by nothing then."""
    answer = await _post(http, _UNLOAD, {"lora_name": name})
    if answer.status >= 300 and answer.status != 404:  # 404: it has no such adapter, or the next one says why
        raise _refused(answer)
    await load_adapter(http, name, path)


async def _post(http: Http, path: str, body: dict[str, str]) -> Answer:
    return await http.control(path, msgspec.json.encode(body), timeout_s=LOAD_S)


def _refused(answer: Answer) -> RollserveError:
    error = refusal(answer, operation=_OPERATION)
    if answer.status in (404, 405):
        error.hint = error.hint or _HINT
    return error


class AdapterControl:
    """The engine, which serves other models too, is not paused: the workers hold the policy's own calls.
    To *keep*, what runs ends with the adapter that it began with."""

    waits = False

    def __init__(self, http: Http, name: str) -> None:
        self._http = http
        self._name = name

    async def check(self, mode: UpdateMode) -> str:
        return ""

    async def pause(self, mode: UpdateMode, within_s: float) -> None:
        """The workers do."""

    async def announce(self, label: str, adapter_path: str | None = None) -> None:
        """Without a path the trainer has loaded it. Cached prefixes are told apart by their salt."""
        if adapter_path is not None:
            await replace_adapter(self._http, self._name, adapter_path)

    async def resume(self) -> None:
        """It was not paused."""

    async def close(self) -> None:
        await self._http.close()
