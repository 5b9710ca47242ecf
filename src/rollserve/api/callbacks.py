"""Routes of a run's callback: what was sent, what is stuck, and sending again."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response

from rollserve.api.answers import page, record
from rollserve.api.bodies import body
from rollserve.api.parts import Core, Paged, StrictRoute, accepts
from rollserve.records.callback import CallbackMessage, CallbackMessageState, CallbackStatus
from rollserve.wire import Listing, ResendMessages, Resent


async def show(core: Core, run_id: str) -> Response:
    """The callback, whether it is stopped, and its messages counted by state. Its secret is told nobody."""
    return record(await core.callbacks.status(run_id))


async def messages(
    core: Core, run_id: str, paging: Paged, state: CallbackMessageState | None = None
) -> Response:
    """In the order of what they tell of; `state=dead` are those that were given up."""
    found = await core.callbacks.messages(run_id, state=state, cursor=paging.cursor, limit=paging.limit)
    return page(found)


async def resend(
    core: Core, run_id: str, asked: Annotated[ResendMessages, body(ResendMessages, optional=True)]
) -> Response:
    """Send dead messages (all, or those named) again; a stopped callback goes on."""
    return record(Resent(messages=await core.callbacks.resend(run_id, asked.ids)))


def router() -> APIRouter:
    routes = APIRouter(tags=["deliveries"], prefix="/v1", route_class=StrictRoute)
    add = routes.add_api_route
    callback = "/runs/{run_id}/callback"
    add(callback, show, methods=["GET"], response_model=CallbackStatus)
    add(f"{callback}/messages", messages, methods=["GET"], response_model=Listing[CallbackMessage])
    add(f"{callback}/resend", resend, methods=["POST"], response_model=Resent,
        openapi_extra=accepts(ResendMessages))  # fmt: skip
    return routes
