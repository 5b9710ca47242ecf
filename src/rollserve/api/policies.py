"""Routes of policies and their backends."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response

from rollserve.api.answers import listing, record
from rollserve.api.bodies import body
from rollserve.api.parts import Core, Paged, StrictRoute, accepts, slice_of
from rollserve.records.policy import Backend, Policy
from rollserve.wire import BackendStatus, CreatePolicy, Listing, RegisterBackend, SetVersion


async def create(core: Core, spec: Annotated[CreatePolicy, body(CreatePolicy)]) -> Response:
    """Make a policy. The same specification again changes nothing; another one is a conflict."""
    return record(await core.policies.create(spec), 201)


async def list_all(core: Core, paging: Paged) -> Response:
    return listing(*slice_of(await core.policies.all(), paging))


async def show(core: Core, name: str) -> Response:
    return record(await core.policies.get(name))


async def set_version(core: Core, name: str, change: Annotated[SetVersion, body(SetVersion)]) -> Response:
    """Announce that the policy's backends now serve this version. It never goes back, save by a
    trainer's rewind."""
    return record(await core.policies.set_version(name, change.version, change.label))


async def pause(core: Core, name: str) -> Response:
    """Start no rollout and make no model call of this policy, until resumed."""
    return record(await core.policies.set_paused(name, True))


async def resume(core: Core, name: str) -> Response:
    return record(await core.policies.set_paused(name, False))


async def register(
    core: Core, name: str, spec: Annotated[RegisterBackend, body(RegisterBackend)]
) -> Response:
    """Probe an inference server and add it. The same URL again replaces its settings."""
    return record(await core.policies.register(name, spec), 201)


async def backends(core: Core, name: str, paging: Paged) -> Response:
    return listing(*slice_of(await core.policies.backends(name), paging))


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
