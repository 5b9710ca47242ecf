"""Implements ``Door`` over a running pod: exec, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rollserve.errors import SandboxError
from rollserve.sandbox.kubernetes.api import FAILURES, ClusterApi, refusal
from rollserve.sandbox.kubernetes.standing import HINTS, Standing, standing

_ANSWER_SLACK_S = 10.0
_LOOK_TIMEOUT_S = 10.0
_ARGUMENT_BYTES = 32 << 10
"""More goes in by stdin: a command is part of an address, whose length may be bounded on the way."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class PodDoor:
    """``on_stop`` is called when its end is first asked for."""

    def __init__(self, api: ClusterApi, name: str, *, stop_s: float, on_stop: Callable[[], None]) -> None:
        self._api = api
        self._name = name
        self._stop_s = stop_s
        self._on_stop = on_stop
        self._stopped = False

    async def opened(self, *, until: float) -> None:
        """Wait for the pod to run. Raises ``SandboxError`` with what Kubernetes says when it won't, or not by
        ``until`` (``time.monotonic``)."""
        pause_s = _FIRST_PAUSE_S
        while True:
            stands = await self._look(until=until)
            if stands.ready:
                return
            if stands.failed:
                raise _error("the pod was not started", stands)
            if time.monotonic() >= until:
                raise _error("the pod was not started in time", stands)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)

    async def call(self, script: str, *, timeout_s: float) -> str:
        text = script.encode()
        if len(text) <= _ARGUMENT_BYTES:
            command, stdin = ["/bin/sh", "-c", f"exec </dev/null\n{script}"], None
        else:
            command, stdin = ["/bin/sh", "-c", 'eval "$(cat)" </dev/null'], text
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_SLACK_S):
                said = await self._api.execute(self._name, command, stdin=stdin, timeout_s=timeout_s)
        except FAILURES as error:
            told = refusal(error).error("the pod does not answer", "sandbox.remote")
            raise await self._reason() or told from error
        return said.decode("ascii", "replace")

    async def _reason(self) -> SandboxError | None:
        """Why a call failed, where it was the pod's end."""
        try:
            stands = await self._look(until=time.monotonic() + _LOOK_TIMEOUT_S)
        except SandboxError:
            return None
        return _error("the pod has ended", stands) if stands.failed else None

    async def _look(self, *, until: float) -> Standing:
        pod = await self._api.get(self._name, until=until)
        if pod is None:
            return Standing(failed=True, reason="NotFound", message="there is no such pod any more")
        return standing(pod)

    async def stop(self) -> None:
        """Gone is what the API server no longer has: its node has then said that nothing runs."""
        if self._stopped:
            return
        self._on_stop()
        until = time.monotonic() + self._stop_s
        await self._api.delete(self._name, until=until)
        await gone(self._api, self._name, until=until)
        self._stopped = True


async def gone(api: ClusterApi, name: str, *, until: float) -> None:
    """Raises ``SandboxError`` when it isn't by then: its node may be away."""
    pause_s = _FIRST_PAUSE_S
    while await api.get(name, until=until) is not None:
        if time.monotonic() >= until:
            raise SandboxError(
                f"the end of pod {name} is not confirmed",
                operation="sandbox.close",
                hint="its node may be away; it is asked for again by the next reaper",
            )
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _error(what: str, stands: Standing) -> SandboxError:
    return SandboxError(f"{what}: {stands}", operation="sandbox.start", hint=HINTS.get(stands.reason))
