"""LoRA adapters of an engine that serves a policy under an adapter's name: vLLM (0.32) and SGLang (0.5.23,
from its source; not run against a real one).

A new version is unloaded and loaded under the same name: calls that run keep the adapter they began with, and
new ones get the new. (vLLM's ``load_inplace`` would be one request, but from then on that server reads the
adapter from disk again for later calls, and ends when it is not there.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rollserve.backend import probing
from rollserve.backend.http import Answer, Http
from rollserve.backend.refusals import refusal
from rollserve.errors import BackendError, InvalidInput, RollserveError
from rollserve.records.update import UpdateMode

LOAD_S = 300.0
"""Of one adapter: it is read from a disk. SGLang's calls of the one before may have to end first."""

PATH_FIELD = "options.adapter_path"

_OPERATION = "backend.adapter"


@dataclass(frozen=True, kw_only=True)
class AdapterRoutes:
    """Of one engine. ``absent`` tells of a refusal to unload whether there was no such adapter. ``hint`` says
    what the engine needs. ``keeping`` is what a trainer should know of an update that *keeps* calls."""

    load: str
    unload: str
    absent: Callable[[Answer], bool]
    hint: str
    keeping: str = ""


VLLM = AdapterRoutes(
    load="/v1/load_lora_adapter",
    unload="/v1/unload_lora_adapter",
    absent=lambda answer: answer.status == 404,  # of a server without the route the next request says so
    hint="is the path there, as the server sees it? Was vLLM started with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1?",
)
SGLANG = AdapterRoutes(
    load="/load_lora_adapter",
    unload="/unload_lora_adapter",
    absent=lambda answer: answer.status == 400 and b"does not exist" in answer.body,
    hint="is the path there, as the server sees it? Was SGLang started with --enable-lora, and one "
    "data-parallel replica?",
    keeping="unloads an adapter once its calls have ended: a commit with adapter_path waits for them",
)


async def load_adapter(http: Http, routes: AdapterRoutes, name: str, path: str) -> None:
    """``path`` is as the server sees it. Raises ``BackendError``, ``BackendUnavailable``."""
    answer = await _post(http, routes.load, {"lora_name": name, "lora_path": path})
    if answer.status >= 300:
        raise _refused(answer, routes)


async def load_unlisted(http: Http, routes: AdapterRoutes, name: str, path: str) -> None:
    """For a probe: what the server has already stays as it is. Raises ``InvalidInput`` (``PATH_FIELD``)."""
    if name in [served.id for served in await probing.listed_models(http)]:
        return
    try:
        await load_adapter(http, routes, name, path)
    except BackendError as error:
        message = f"{http.url} does not load it: {error.message}"
        raise InvalidInput(message, field=PATH_FIELD, hint=error.hint) from error


async def replace_adapter(http: Http, routes: AdapterRoutes, name: str, path: str) -> None:
    """The same again is harmless. Raises as ``load_adapter``; the name is served by nothing then, or by an
    SGLang as it was before."""
    answer = await _post(http, routes.unload, {"lora_name": name})
    if answer.status >= 300 and not routes.absent(answer):
        raise _refused(answer, routes)
    await load_adapter(http, routes, name, path)


async def _post(http: Http, path: str, body: dict[str, str]) -> Answer:
    return await http.control(path, msgspec.json.encode(body), timeout_s=LOAD_S)


def _refused(answer: Answer, routes: AdapterRoutes) -> RollserveError:
    error = refusal(answer, operation=_OPERATION)
    if answer.status in (400, 404, 405):
        error.hint = error.hint or routes.hint
    return error


class AdapterControl:
    """The engine, which serves other models too, is not paused: the workers hold the policy's own calls.
    To *keep*, what runs ends with the adapter that it began with."""

    waits = False

    def __init__(self, http: Http, routes: AdapterRoutes, name: str) -> None:
        self._http = http
        self._routes = routes
        self._name = name

    async def check(self, mode: UpdateMode) -> str:
        if mode is not UpdateMode.KEEP or not self._routes.keeping:
            return ""
        return f"{self._http.url} {self._routes.keeping}"

    async def pause(self, mode: UpdateMode, within_s: float) -> None:
        """The workers do."""

    async def announce(self, label: str, adapter_path: str | None = None) -> None:
        """Without a path the trainer has loaded it. Cached prefixes are told apart by their salt."""
        if adapter_path is not None:
            await replace_adapter(self._http, self._routes, self._name, adapter_path)

    async def resume(self) -> None:
        """It was not paused."""

    async def close(self) -> None:
        await self._http.close()
