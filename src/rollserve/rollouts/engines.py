"""What an update does to the engines of its policy's backends: paused, told of their weights, going on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from rollserve.backend.control import Control
from rollserve.errors import BackendError, BackendUnavailable, Conflict, InvalidInput
from rollserve.records.policy import Backend
from rollserve.records.update import UpdateMode, WeightUpdate
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.ports import Ports

log = logging.getLogger(__name__)

STEP_S = 0.05
"""Between looks at whether the workers' calls have ended."""


class Engines:
    def __init__(self, ports: Ports, policies: Policies, fleet: Fleet) -> None:
        self._ports = ports
        self._store = ports.store
        self._clock = ports.clock
        self._policies = policies
        self._fleet = fleet

    async def able(self, backends: Sequence[Backend], mode: UpdateMode) -> tuple[list[Backend], list[str]]:
        """Those that answer, and what the trainer should know. One that does not answer is left out: it has
        to prove its weights at the commit."""
        able: list[Backend] = []
        words: list[str] = []
        for backend in backends:
            async with self._control(backend) as control:
                try:
                    words.append(await control.check(mode))
                except BackendUnavailable as error:
                    words.append(f"backend {backend.id} does not answer: {error.message}")
                else:
                    able.append(backend)
        if not able:
            raise Conflict(f"no backend answers: {'; '.join(words)}", field="backends")
        return able, [word for word in words if word]

    async def pause(self, update: WeightUpdate) -> list[str]:
        """Those that are paused now. Raises ``BackendUnavailable`` where none answered."""
        backends = await self._of(update)
        found = await asyncio.gather(*(self._pause_one(backend, update) for backend in backends))
        paused = [backend.id for backend, fine in zip(backends, found, strict=True) if fine]
        if not paused:
            raise BackendUnavailable("no backend answered", operation="update.pause")
        return paused

    async def _pause_one(self, backend: Backend, update: WeightUpdate) -> bool:
        """False when the server does not answer."""
        async with self._control(backend) as control:
            if update.mode is not UpdateMode.KEEP and not control.waits:
                while not self._fleet.quiet(backend.id, update.id):
                    await self._clock.sleep(STEP_S)
            try:
                await control.pause(update.mode, max(1.0, update.expires_at - self._clock.now()))
            except BackendUnavailable as error:
                log.warning("backend %s can't be paused: %s", backend.id, error)
                return False
        return True

    async def announce(self, update: WeightUpdate, label: str, adapter_path: str | None) -> set[str]:
        """Label and empty cache, then on; the backends that have heard it. Raises ``BackendUnavailable``
        where none has, ``InvalidInput`` (field ``adapter_path``)."""
        backends = await self._of(update)
        if adapter_path is not None and (whole := [b for b in backends if b.info.adapter_of is None]):
            message = f"{whole[0].spec.url} serves the policy as a whole model, and no adapter"
            raise InvalidInput(message, field="adapter_path")

        async def tell(control: Control) -> None:
            await control.announce(label, adapter_path)
            await control.resume()

        failed = await self._each(backends, tell)
        told = {backend.id for backend in backends if backend.id not in failed}
        if not told:
            raise BackendUnavailable(
                f"no backend could be told: {'; '.join(failed.values()) or 'all are gone'}",
                operation="update.commit",
            )
        return told

    async def resume(self, update: WeightUpdate) -> set[str]:
        """Those that go on."""
        backends = await self._of(update)
        failed = await self._each(backends, lambda control: control.resume())
        return {backend.id for backend in backends if backend.id not in failed}

    async def _of(self, update: WeightUpdate) -> list[Backend]:
        return [b for b in await self._policies.registered(update.policy) if b.id in update.backends]

    async def _each(
        self, backends: Sequence[Backend], ask: Callable[[Control], Awaitable[None]]
    ) -> dict[str, str]:
        """All at once; why each of the others did not."""

        async def one(backend: Backend) -> str | None:
            async with self._control(backend) as control:
                try:
                    await ask(control)
                except BackendError as error:
                    log.warning("backend %s: %s", backend.id, error)
                    return error.message
            return None

        found = await asyncio.gather(*(one(backend) for backend in backends))
        return {backend.id: why for backend, why in zip(backends, found, strict=True) if why is not None}

    @asynccontextmanager
    async def _control(self, backend: Backend) -> AsyncIterator[Control]:
        adapter = None
        if backend.info.adapter_of is not None:
            adapter = (await self._store.get_policy(backend.policy)).spec.model
        shared_with = await self._policies.shared_with(backend)
        control = self._ports.open_control(backend.spec, shared_with, adapter)
        try:
            yield control
        finally:
            await control.close()
