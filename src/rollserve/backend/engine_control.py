"""``backend.control`` for each engine: pausing it, its label, its prefix cache."""

from __future__ import annotations

import msgspec

from rollserve.backend.adapters import SGLANG, VLLM, AdapterControl
from rollserve.backend.control import Control
from rollserve.backend.http import Answer, Http
from rollserve.backend.refusals import describe, refusal
from rollserve.errors import InvalidInput
from rollserve.records.policy import BackendKind, BackendSpec
from rollserve.records.update import UpdateMode

_ABSENT = (403, 404, 405, 501)
_OPERATION = "backend.control"


def make_control(spec: BackendSpec, shared_with: str | None = None, adapter: str | None = None) -> Control:
    """``shared_with`` is another policy that the same server serves: pausing it would stop that one, too.
    ``adapter`` is the policy's model, where that is an adapter of the server's."""
    key = None if spec.api_key is None else spec.api_key.get_secret_value()
    http = Http(spec.url, api_key=key)
    if adapter is not None:
        return AdapterControl(http, SGLANG if spec.kind is BackendKind.SGLANG else VLLM, adapter)
    if shared_with is not None:
        return Untouched(http, f"it also serves the policy {shared_with!r}, which a pause would stop")
    if spec.kind is BackendKind.SGLANG:
        return SglangControl(http)
    if spec.kind in (BackendKind.OPENAI, BackendKind.CHAT, BackendKind.TEXT):
        return Untouched(http, "a server of this kind can't be paused")
    return VllmControl(http)


class VllmControl:
    """vLLM 0.32, whose routes need ``VLLM_SERVER_DEV_MODE=1``; the local and the scripted server too."""

    waits = True
    _MODES = {UpdateMode.DRAIN: "wait", UpdateMode.ABORT: "abort", UpdateMode.KEEP: "keep"}

    def __init__(self, http: Http) -> None:
        self._http = http

    async def check(self, mode: UpdateMode) -> str:
        answer = await self._http.get("/is_paused")
        if answer.status in _ABSENT:
            raise _missing(self._http, "/is_paused", answer, "start vLLM with VLLM_SERVER_DEV_MODE=1")
        return ""

    async def pause(self, mode: UpdateMode, within_s: float) -> None:
        await _ask(self._http, f"/pause?mode={self._MODES[mode]}", timeout_s=within_s)

    async def announce(self, label: str, adapter_path: str | None = None) -> None:
        await _ask(self._http, "/update_weight_version", {"new_version": label})
        await _ask(self._http, "/reset_prefix_cache")

    async def resume(self) -> None:
        await _ask(self._http, "/resume")

    async def close(self) -> None:
        await self._http.close()


class SglangControl:
    """SGLang 0.5.23 (from its source). Its pause does not wait for what is in flight. To *keep*, what runs is
    retracted: its cache is filled again under the new weights, and can be flushed, which a pause in place
    forbids."""

    waits = False
    _MODES = {UpdateMode.DRAIN: "in_place", UpdateMode.ABORT: "abort", UpdateMode.KEEP: "retract"}

    def __init__(self, http: Http) -> None:
        self._http = http

    async def check(self, mode: UpdateMode) -> str:
        """A route that only takes POST answers GET with 405."""
        answer = await self._http.get("/pause_generation")
        if answer.status == 404:
            raise _missing(self._http, "/pause_generation", answer, "use SGLang 0.5.6 or newer")
        return ""

    async def pause(self, mode: UpdateMode, within_s: float) -> None:
        await _ask(self._http, "/pause_generation", {"mode": self._MODES[mode]}, timeout_s=within_s)

    async def announce(self, label: str, adapter_path: str | None = None) -> None:
        await _ask(self._http, "/flush_cache")
        body = {"new_version": label, "abort_all_requests": False}
        await _ask(self._http, "/update_weight_version", body)

    async def resume(self) -> None:
        await _ask(self._http, "/continue_generation", {})

    async def close(self) -> None:
        await self._http.close()


class Untouched:
    """Only the workers stop sending. ``why`` the server itself is left alone."""

    waits = False

    def __init__(self, http: Http, why: str) -> None:
        self._http = http
        self._why = why

    async def check(self, mode: UpdateMode) -> str:
        if mode is UpdateMode.KEEP:
            message = f"calls can't stand still in {self._http.url}: {self._why}"
            raise InvalidInput(message, field="mode", hint="use drain or abort")
        return f"{self._http.url} is not paused ({self._why}), nor its prefix cache emptied"

    async def pause(self, mode: UpdateMode, within_s: float) -> None:
        """The workers do."""

    async def announce(self, label: str, adapter_path: str | None = None) -> None:
        """It has no label of this policy's."""

    async def resume(self) -> None:
        """It was not paused."""

    async def close(self) -> None:
        await self._http.close()


async def _ask(
    http: Http, path: str, body: dict[str, object] | None = None, *, timeout_s: float | None = None
) -> None:
    data = b"" if body is None else msgspec.json.encode(body)
    answer = await http.control(path, data, timeout_s=timeout_s)
    if answer.status >= 300:
        raise refusal(answer, operation=_OPERATION)


def _missing(http: Http, path: str, answer: Answer, hint: str) -> InvalidInput:
    message = f"{http.url} has no route {path}, so it can't be paused: {describe(answer)}"
    return InvalidInput(message, field="backends", hint=hint)
