"""An update of a policy's weights, from the trainer's side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollserve.client.http import Transport, part
from rollserve.errors import LeaseLost, RollserveError
from rollserve.records.policy import Policy
from rollserve.records.update import UpdateMode, UpdateState, WeightUpdate

_FIRST_LOOK_S = 0.01
_LOOK_S = 0.5


class Updates:
    """The routes of one policy's updates."""

    def __init__(self, transport: Transport, policy: str) -> None:
        self._transport = transport
        self._path = f"/v1/policies/{part(policy)}/updates"

    async def begin(self, mode: UpdateMode, lease_s: float) -> WeightUpdate:
        body = {"mode": mode.value, "lease_s": lease_s}
        raw = await self._transport.request("POST", self._path, body, repeatable=False)
        return WeightUpdate.model_validate_json(raw)

    async def get(self, update_id: str) -> WeightUpdate:
        return WeightUpdate.model_validate_json(
            await self._transport.request("GET", f"{self._path}/{part(update_id)}")
        )

    async def commit(
        self,
        update_id: str,
        version: int,
        label: str | None,
        canary: Sequence[float] | None,
        adapter_path: str | None = None,
    ) -> Policy:
        body: dict[str, object] = {"version": version}
        if label is not None:
            body["label"] = label
        if canary is not None:
            body["canary"] = [float(value) for value in canary]
        if adapter_path is not None:
            body["adapter_path"] = adapter_path
        raw = await self._transport.request("POST", f"{self._path}/{part(update_id)}/commit", body)
        return Policy.model_validate_json(raw)

    async def abort(self, update_id: str) -> WeightUpdate:
        raw = await self._transport.request("POST", f"{self._path}/{part(update_id)}/abort")
        return WeightUpdate.model_validate_json(raw)

    async def renew(self, update_id: str, lease_s: float | None = None) -> WeightUpdate:
        body = {} if lease_s is None else {"lease_s": lease_s}
        raw = await self._transport.request("POST", f"{self._path}/{part(update_id)}/renew", body)
        return WeightUpdate.model_validate_json(raw)

    async def ready(self, update_id: str) -> WeightUpdate:
        """Wait until the backends are paused. Raises ``LeaseLost`` when the update ends before."""
        look_s = _FIRST_LOOK_S
        while True:
            update = await self.get(update_id)
            if update.state is UpdateState.READY:
                return update
            if not update.open:
                raise LeaseLost(f"update {update_id} is {update.state.value}: {update.detail}")
            await asyncio.sleep(look_s)
            look_s = min(_LOOK_S, look_s * 2)


class UpdateHandle:
    """An update that is ready: the policy's backends are paused, and their weights may be changed.
    ``canary_ids`` are what ``commit(canary=…)`` are logprobs of (of each but the first)."""

    def __init__(self, updates: Updates, update: WeightUpdate) -> None:
        self._updates = updates
        self.update = update
        self.committed: Policy | None = None

    @property
    def canary_ids(self) -> list[int]:
        return self.update.canary_ids

    async def commit(
        self,
        version: int,
        *,
        label: str | None = None,
        canary: Sequence[float] | None = None,
        adapter_path: str | None = None,
    ) -> Policy:
        """The backends serve ``version`` now; with ``adapter_path``, once they have loaded it. Raises
        ``Conflict`` (field ``canary``) when they disagree and only figures could tell; it may be called again
        with them."""
        self.committed = await self._updates.commit(self.update.id, version, label, canary, adapter_path)
        return self.committed


@asynccontextmanager
async def updating(updates: Updates, mode: UpdateMode, lease_s: float) -> AsyncIterator[UpdateHandle]:
    """Begin, wait until ready, renew while inside; abort when left without a commit."""
    begun = await updates.begin(mode, lease_s)
    renewing = asyncio.create_task(_renew(updates, begun.id, lease_s))
    handle: UpdateHandle | None = None
    try:
        handle = UpdateHandle(updates, await updates.ready(begun.id))
        yield handle
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
        if handle is None or handle.committed is None:
            with contextlib.suppress(RollserveError):
                await updates.abort(begun.id)


async def _renew(updates: Updates, update_id: str, lease_s: float) -> None:
    """A renewal that fails is not the end: the next may not, and the commit will say."""
    while True:
        await asyncio.sleep(lease_s / 3)
        with contextlib.suppress(RollserveError):
            await updates.renew(update_id)
