"""Policies and their backends; each change is told to every worker, older news never over newer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from rollserve.errors import BackendError, InvalidInput, NotFound
from rollserve.executor.base import BackendReport, PolicyView
from rollserve.gateway.rendering import check_renderer
from rollserve.gateway.tokens import check_tokenizer
from rollserve.records.base import new_id
from rollserve.records.policy import (
    Backend,
    BackendInfo,
    BackendSpec,
    BackendState,
    Policy,
    PolicySpec,
)
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.ports import Ports


@dataclass(frozen=True, kw_only=True)
class BackendCheck:
    """What a look at a backend found just now."""

    backend: Backend
    ok: bool
    detail: str = ""


def backend_json(backend: Backend) -> bytes:
    """The backend with its key in clear: for workers only, never for an answer or a log."""
    data = backend.model_dump(mode="json")
    if backend.spec.api_key is not None:
        data["spec"]["api_key"] = backend.spec.api_key.get_secret_value()
    return msgspec.json.encode(data)


class Policies:
    """``changed`` is rung when work may start that could not before; ``happened`` on any event."""

    def __init__(self, ports: Ports, *, changed: Bell, happened: Bell) -> None:
        self._store = ports.store
        self._executor = ports.executor
        self._probe = ports.probe_backend
        self._changed = changed
        self._happened = happened
        self._telling = asyncio.Lock()
        self._changing = asyncio.Lock()
        # Workers outlive a server: revisions must grow over its restarts too.
        self._revision = int(ports.clock.now() * 1000)

    async def create(self, spec: PolicySpec) -> Policy:
        """The same spec again returns the policy as it is. Raises ``Conflict`` for another one,
        ``InvalidInput`` for a renderer that there is not, or that has no such options."""
        # A subclass (a request's body) would equal no stored specification.
        spec = PolicySpec.model_validate(spec.model_dump())
        await asyncio.to_thread(check_renderer, spec.renderer)
        await asyncio.to_thread(check_tokenizer, spec.tokenizer)
        await self._store.create_policy(Policy(spec=spec))
        return await self.tell(spec.name)

    async def get(self, name: str) -> Policy:
        return await self._store.get_policy(name)

    async def all(self) -> list[Policy]:
        return await self._store.list_policies()

    async def set_version(self, name: str, version: int, label: str | None) -> Policy:
        """Raises ``VersionRegression``; the same version and label again changes nothing."""
        await self._store.set_policy_version(name, version, label or str(version))
        return await self.tell(name)

    async def set_paused(self, name: str, paused: bool) -> Policy:
        await self._store.set_policy_paused(name, paused)
        return await self.tell(name)

    async def tell(self, name: str) -> Policy:
        """Send every worker the policy as it is now."""
        async with self._telling:
            policy = await self._store.get_policy(name)
            backends = await self._store.list_backends(name)
            self._revision += 1
            self._executor.broadcast(
                PolicyView(
                    revision=self._revision,
                    policy_json=policy.model_dump_json().encode(),
                    backends_json=[backend_json(backend) for backend in backends],
                )
            )
        self._changed.ring()
        self._happened.ring()
        return policy

    async def tell_all(self) -> None:
        for policy in await self._store.list_policies():
            await self.tell(policy.spec.name)

    # -- backends
    async def register(self, name: str, spec: BackendSpec) -> Backend:
        """Probe first: nothing is kept of a URL that is no backend or serves another model. The same
        URL again replaces its settings and makes it active."""
        policy = await self._store.get_policy(name)
        info = await self._checked(spec, policy.spec.model)
        async with self._changing:
            known = {backend.spec.url: backend.id for backend in await self._store.list_backends(name)}
            backend = Backend(id=known.get(spec.url) or new_id("be"), policy=name, spec=spec, info=info)
            await self._store.put_backend(backend)
        await self.tell(name)
        return backend

    async def _checked(self, spec: BackendSpec, model: str) -> BackendInfo:
        if not spec.url.startswith(("http://", "https://")):
            raise InvalidInput(f"{spec.url!r} is no http:// or https:// address", field="url")
        try:
            info = await self._probe(spec, model)
        except BackendError as error:
            raise InvalidInput(
                f"no {spec.kind.value} backend answers at {spec.url}: {error.message}", field="url"
            ) from error
        if model not in info.models:
            serves = ", ".join(repr(name) for name in info.models) or "no model"
            raise InvalidInput(f"{spec.url} serves {serves}, not the policy's model {model!r}", field="url")
        return info

    async def backends(self, name: str) -> list[Backend]:
        await self._store.get_policy(name)
        return await self._store.list_backends(name)

    async def backend(self, name: str, backend_id: str) -> Backend:
        backend = await self._store.get_backend(backend_id)
        if backend.policy != name:
            raise NotFound(f"policy {name!r} has no backend {backend_id!r}")
        return backend

    async def drain(self, name: str, backend_id: str) -> Backend:
        """No new session goes there; those that are there move at their next call."""
        async with self._changing:
            backend = await self.backend(name, backend_id)
            draining = backend.model_copy(update={"state": BackendState.DRAINING})
            await self._store.put_backend(draining)
        await self.tell(name)
        return draining

    async def remove(self, name: str, backend_id: str) -> None:
        async with self._changing:
            await self.backend(name, backend_id)
            await self._store.delete_backend(backend_id)
        await self.tell(name)

    async def check(self, name: str, backend_id: str) -> BackendCheck:
        """Look at the backend now."""
        backend = await self.backend(name, backend_id)
        policy = await self._store.get_policy(name)
        try:
            await self._checked(backend.spec, policy.spec.model)
        except InvalidInput as error:
            return BackendCheck(backend=backend, ok=False, detail=error.message)
        return BackendCheck(backend=backend, ok=True)

    async def report(self, report: BackendReport) -> None:
        """A worker saw a backend fail or come back. One that drains, or is gone, stays so."""
        async with self._changing:
            try:
                backend = await self._store.get_backend(report.backend_id)
            except NotFound:
                return
            state = BackendState.ACTIVE if report.ok else BackendState.FAILED
            if backend.state in (state, BackendState.DRAINING):
                return
            error = None if report.ok else report.detail
            await self._store.put_backend(backend.model_copy(update={"state": state, "error": error}))
        await self.tell(backend.policy)
