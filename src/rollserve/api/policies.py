"""Routes of policies and their backends."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response

from rollserve.api.answers import page, record
from rollserve.api.bodies import body
from rollserve.api.parts import Core, Paged, StrictRoute, accepts
from rollserve.records.policy import Backend, Policy
from rollserve.records.update import WeightUpdate
from rollserve.wire import (
    BackendStatus,
    BeginUpdate,
    CommitUpdate,
    CreatePolicy,
    Listing,
    RegisterBackend,
    RenewUpdate,
    SetVersion,
)


async def create(core: Core, spec: Annotated[CreatePolicy, body(CreatePolicy)]) -> Response:
    """Make a policy. The same specification again changes nothing; another one is a conflict."""
    return record(await core.policies.create(spec), 201)


async def list_all(core: Core, paging: Paged) -> Response:
    return page(await core.policies.page(cursor=paging.cursor, limit=paging.limit))


async def show(core: Core, name: str) -> Response:
    return record(await core.policies.get(name))


async def set_version(core: Core, name: str, change: Annotated[SetVersion, body(SetVersion)]) -> Response:
    """Announce that the policy's backends now serve this version. It never goes back, save by a
    trainer's rewind."""
    return record(await core.updates.set_version(name, change.version, change.label))


async def begin_update(core: Core, name: str, asked: Annotated[BeginUpdate, body(BeginUpdate)]) -> Response:
    """Stop sending calls to the policy's backends and pause them; ``ready`` says when they are."""
    return record(await core.updates.begin(name, asked.mode, asked.lease_s), 201)


async def show_update(core: Core, name: str, update_id: str) -> Response:
    return record(await core.updates.get(name, update_id))


async def commit_update(
    core: Core, name: str, update_id: str, asked: Annotated[CommitUpdate, body(CommitUpdate)]
) -> Response:
    """The backends have the new weights: check them, and go on under the version."""
    policy = await core.updates.commit(
        name, update_id, asked.version, asked.label, asked.canary, asked.adapter_path
    )
    return record(policy)


async def abort_update(core: Core, name: str, update_id: str) -> Response:
    """The backends have the weights that they had: go on."""
    return record(await core.updates.abort(name, update_id))


async def renew_update(
    core: Core, name: str, update_id: str, asked: Annotated[RenewUpdate, body(RenewUpdate)]
) -> Response:
    return record(await core.updates.renew(name, update_id, asked.lease_s))


async def pause(core: Core, name: str) -> Response:
    """Start no rollout and make no model call of this policy, until resumed."""
    return record(await core.policies.set_paused(name, True))


async def resume(core: Core, name: str) -> Response:
    return record(await core.policies.set_paused(name, False))


async def register(
    core: Core, name: str, spec: Annotated[RegisterBackend, body(RegisterBackend)]
) -> Response:
    """Probe an inference server and add it. The same one again, with or without ``/v1``, gets the new
    settings."""
    return record(await core.policies.register(name, spec), 201)


async def backends(core: Core, name: str, paging: Paged) -> Response:
    return page(await core.policies.backends(name, cursor=paging.cursor, limit=paging.limit))


async def backend(core: Core, name: str, backend_id: str) -> Response:
    return record(await core.policies.backend(name, backend_id))


async def drain(core: Core, name: str, backend_id: str) -> Response:
    """Send it no more calls; those in flight end there."""
    return record(await core.policies.drain(name, backend_id))


async def remove(core: Core, name: str, backend_id: str) -> Response:
    await core.policies.remove(name, backend_id)
    return Response(status_code=204)


async def health(core: Core, name: str, backend_id: str) -> Response:
    """Look at the backend now."""
    check = await core.policies.check(name, backend_id)
    return record(BackendStatus(backend=check.backend, ok=check.ok, detail=check.detail))


def router() -> APIRouter:
    routes = APIRouter(tags=["policies"], prefix="/v1/policies", route_class=StrictRoute)
    add = routes.add_api_route
    add("", create, methods=["POST"], status_code=201, response_model=Policy,
        openapi_extra=accepts(CreatePolicy))  # fmt: skip
    add("", list_all, methods=["GET"], response_model=Listing[Policy])
    add("/{name}", show, methods=["GET"], response_model=Policy)
    add("/{name}/version", set_version, methods=["POST"], response_model=Policy,
        openapi_extra=accepts(SetVersion))  # fmt: skip
    add("/{name}/updates", begin_update, methods=["POST"], status_code=201, response_model=WeightUpdate,
        openapi_extra=accepts(BeginUpdate))  # fmt: skip
    add("/{name}/updates/{update_id}", show_update, methods=["GET"], response_model=WeightUpdate)
    add("/{name}/updates/{update_id}/commit", commit_update, methods=["POST"], response_model=Policy,
        openapi_extra=accepts(CommitUpdate))  # fmt: skip
    add("/{name}/updates/{update_id}/abort", abort_update, methods=["POST"], response_model=WeightUpdate)
    add("/{name}/updates/{update_id}/renew", renew_update, methods=["POST"], response_model=WeightUpdate,
        openapi_extra=accepts(RenewUpdate))  # fmt: skip
    add("/{name}/pause", pause, methods=["POST"], response_model=Policy)
    add("/{name}/resume", resume, methods=["POST"], response_model=Policy)
    add("/{name}/backends", register, methods=["POST"], status_code=201, response_model=Backend,
        openapi_extra=accepts(RegisterBackend))  # fmt: skip
    add("/{name}/backends", backends, methods=["GET"], response_model=Listing[Backend])
    add("/{name}/backends/{backend_id}", backend, methods=["GET"], response_model=Backend)
    add("/{name}/backends/{backend_id}", remove, methods=["DELETE"], status_code=204, response_model=None)
    add("/{name}/backends/{backend_id}/drain", drain, methods=["POST"], response_model=Backend)
    add("/{name}/backends/{backend_id}/health", health, methods=["GET"], response_model=BackendStatus)
    return routes
