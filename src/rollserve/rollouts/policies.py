"""Policies and their backends; each change is told to every worker, older news never over newer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from rollserve.addresses import checked_root, root_of
from rollserve.errors import BackendError, Conflict, InvalidInput, NotFound, listed, nearest
from rollserve.executor.base import BackendReport, PolicyView
from rollserve.gateway.rendering import check_renderer
from rollserve.records.base import new_id
from rollserve.records.policy import (
    Backend,
    BackendInfo,
    BackendKind,
    BackendSpec,
    BackendState,
    Policy,
    PolicySpec,
)
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.pages import every
from rollserve.rollouts.patience import patiently
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.templates import Templates, trouble_of
from rollserve.store.values import Page

T = TypeVar("T")

MAX_BACKENDS = 1000
"""Of one policy: a worker is told all of them in one message."""


@dataclass(frozen=True, kw_only=True)
class BackendCheck:
    """What a look at a backend found just now."""

    backend: Backend
    ok: bool
    detail: str = ""


def no_backend(policy: str, backend_id: str, known: Sequence[Backend]) -> NotFound:
    ids = [backend.id for backend in known]
    hint = nearest(backend_id, ids, cutoff=0.8) or listed(ids)
    return NotFound(f"policy {policy!r} has no backend {backend_id!r}", field="backend_id", hint=hint)


def backend_json(backend: Backend) -> bytes:
    """The backend with its key in clear: for workers only, never for an answer or a log."""
    data = backend.model_dump(mode="json")
    if backend.spec.api_key is not None:
        data["spec"]["api_key"] = backend.spec.api_key.get_secret_value()
    return msgspec.json.encode(data)


def _differences(there: PolicySpec, asked: PolicySpec) -> str:
    """Field by field, for who has forgotten what the policy is."""
    kept, wanted = there.model_dump(mode="json"), asked.model_dump(mode="json")
    differ = [
        f"{name} is {kept[name]!r}, not {wanted[name]!r}" for name in kept if kept[name] != wanted[name]
    ]
    return f"there {', '.join(differ)}; give this one another name"


def _check_interface(spec: BackendSpec, policy: PolicySpec) -> None:
    """The backends of a policy are spoken to alike: a session may move from one to another at any call."""
    if spec.kind.interface != policy.interface:
        kinds = [kind.value for kind in BackendKind if kind.interface == policy.interface]
        raise InvalidInput(
            f"a backend of kind {spec.kind.value!r} has the interface {spec.kind.interface!r}, and policy "
            f"{policy.name!r} has {policy.interface!r}: one policy can't mix them",
            field="kind",
            hint=f"kinds with the policy's interface: {', '.join(kinds)}; or make another policy",
        )
    if "text" not in spec.accepts:
        raise InvalidInput("a backend takes text at least", field="accepts")
    if "image" in spec.accepts and policy.interface == "tokens":
        raise InvalidInput(
            f"a backend of kind {spec.kind.value!r} is sent token ids, and images can't be sent so",
            field="accepts",
            hint="kinds that take images: chat, text",
        )


class Policies:
    """``changed`` is rung when work may start that could not before; ``happened`` on any event."""

    def __init__(self, ports: Ports, templates: Templates, *, changed: Bell, happened: Bell) -> None:
        self._store = ports.store
        self._clock = ports.clock
        self._executor = ports.executor
        self._probe = ports.probe_backend
        self._check_tokenizer = ports.check_tokenizer
        self._templates = templates
        self._changed = changed
        self._happened = happened
        self._telling = asyncio.Lock()
        self._changing = asyncio.Lock()
        # Workers outlive a server: revisions must grow over its restarts too.
        self._revision = int(ports.clock.now() * 1000)

    async def create(self, spec: PolicySpec) -> Policy:
        """The same spec again returns the policy as it is. Raises ``Conflict`` for another one,
        ``InvalidInput`` for a renderer that there is not, or that has no such options, for a tokenizer that
        can't be loaded here, and where there is no tokenizer and tokens."""
        # A subclass (a request's body) would equal no stored specification.
        spec = PolicySpec.model_validate(spec.model_dump())
        if spec.interface == "tokens":
            await asyncio.to_thread(check_renderer, spec.renderer)
        if spec.tokenizer is not None:
            await self._check_tokenizer(spec.tokenizer)
        elif spec.interface != "text":
            raise InvalidInput(
                f"a policy whose interface is {spec.interface!r} needs a tokenizer",
                field="tokenizer",
                hint="only one whose backends give text and no token ids (interface 'text') goes without",
            )
        try:
            await self._store.create_policy(Policy(spec=spec))
        except Conflict as error:
            error.hint = _differences((await self._store.get_policy(spec.name)).spec, spec)
            raise
        self._templates.ask(spec.name)
        return await self.tell(spec.name)

    async def get(self, name: str) -> Policy:
        return await self._store.get_policy(name)

    async def page(self, *, cursor: str | None = None, limit: int = 100) -> Page[Policy]:
        return await self._store.list_policies(cursor=cursor, limit=limit)

    async def set_version(self, name: str, version: int, label: str | None) -> Policy:
        """Raises ``VersionRegression``; ``Conflict`` while an update of the weights is open. The same version
        and label again changes nothing."""
        await self._store.set_policy_version(name, version, label or str(version))
        return await self.tell(name)

    async def set_paused(self, name: str, paused: bool) -> Policy:
        await self._store.set_policy_paused(name, paused)
        return await self.tell(name)

    async def tell(self, name: str) -> Policy:
        """Send every worker the policy as it is now. What changed is committed by then, so a busy store
        only delays the news."""
        async with self._telling:
            policy = await self._patiently(partial(self._store.get_policy, name))
            backends = await self._patiently(partial(self.registered, name))
            self._revision += 1
            self._executor.broadcast(
                PolicyView(
                    revision=self._revision,
                    policy_json=policy.model_dump_json(exclude={"canary"}).encode(),
                    backends_json=[backend_json(backend) for backend in backends],
                )
            )
        self._changed.ring()
        self._happened.ring()
        return policy

    async def tell_all(self) -> None:
        for policy in await every(self._store.list_policies):
            await self.tell(policy.spec.name)

    async def registered(self, name: str) -> list[Backend]:
        return (await self._store.list_backends(name, limit=MAX_BACKENDS)).items

    async def shared_with(self, backend: Backend) -> str | None:
        """Another policy that the same server is registered for."""
        for other in await every(self._store.list_backends):
            if root_of(other.spec.url) == root_of(backend.spec.url) and other.policy != backend.policy:
                return other.policy
        return None

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await patiently(self._clock, ask)

    # -- backends
    async def register(self, name: str, spec: BackendSpec) -> Backend:
        """Probe first: nothing is kept of a URL that is no backend or serves another model. The same server
        again, however its URL is written, keeps its id, gets the new settings and is active; others of its
        address, as older versions kept them, are removed. Raises ``InvalidInput``, and ``Conflict`` for one
        more than ``MAX_BACKENDS``."""
        policy = await self._store.get_policy(name)
        _check_interface(spec, policy.spec)
        spec = spec.model_copy(update={"url": checked_root(spec.url)})
        await self._check_readable(policy)
        info = await self._checked(spec, policy.spec.model)
        async with self._changing:
            known = await self.registered(name)
            same = [backend.id for backend in known if root_of(backend.spec.url) == spec.url]
            if not same and len(known) >= MAX_BACKENDS:
                raise Conflict(
                    f"policy {name!r} has {MAX_BACKENDS} backends", hint="remove those that are gone"
                )
            first = same[0] if same else new_id("be")
            backend = Backend(id=first, policy=name, spec=spec, info=info)
            await self._store.put_backend(backend)
            for other in same[1:]:
                await self._store.delete_backend(other)
        self._templates.ask(name)
        await self.tell(name)
        return backend

    async def _check_readable(self, policy: Policy) -> None:
        """Of a policy whose template could not be probed: is its tokenizer there now?"""
        if policy.spec.tokenizer is None or trouble_of(policy) is None:
            return
        try:
            await self._check_tokenizer(policy.spec.tokenizer)
        except InvalidInput as error:
            error.field = "policy.tokenizer"
            raise

    async def _checked(self, spec: BackendSpec, model: str) -> BackendInfo:
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

    async def backends(self, name: str, *, cursor: str | None = None, limit: int = 100) -> Page[Backend]:
        await self._store.get_policy(name)
        return await self._store.list_backends(name, cursor=cursor, limit=limit)

    async def backend(self, name: str, backend_id: str) -> Backend:
        try:
            backend = await self._store.get_backend(backend_id)
        except NotFound:
            backend = None
        if backend is None or backend.policy != name:
            await self._store.get_policy(name)
            raise no_backend(name, backend_id, await self.registered(name))
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

    async def fence(self, backend_id: str, why: str | None) -> None:
        """It does not serve the weights it claims, and is not used; None: it does again. Workers hear of it
        with the policy's next view."""
        async with self._changing:
            try:
                backend = await self._patiently(partial(self._store.get_backend, backend_id))
            except NotFound:
                return
            state = BackendState.ACTIVE if why is None else BackendState.FENCED
            seen = backend.model_copy(update={"state": state, "error": why})
            await self._patiently(partial(self._store.put_backend, seen))

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
        """A worker saw a backend fail or come back. One that drains, is fenced or gone, stays so."""
        async with self._changing:
            try:
                backend = await self._patiently(partial(self._store.get_backend, report.backend_id))
            except NotFound:
                return
            state = BackendState.ACTIVE if report.ok else BackendState.FAILED
            if backend.state in (state, BackendState.DRAINING, BackendState.FENCED):
                return
            error = None if report.ok else report.detail
            seen = backend.model_copy(update={"state": state, "error": error})
            await self._patiently(partial(self._store.put_backend, seen))
        await self.tell(backend.policy)
