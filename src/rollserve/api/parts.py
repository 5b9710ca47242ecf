"""What the routes share: the coordinator of this app, paging, idempotency keys, and strict names of
query parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.types import Receive

from rollserve.api.problems import problem_response
from rollserve.errors import InvalidInput, NotFound, RollserveError, UnknownName
from rollserve.records.base import NAME_PATTERN
from rollserve.rollouts.coordinator import Coordinator


async def _coordinator(request: Request) -> Coordinator:
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


Core = Annotated[Coordinator, Depends(_coordinator)]

IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", description="Makes it safe to send the request again.")
]


@dataclass(frozen=True, slots=True)
class Paging:
    cursor: str | None
    limit: int


async def _paging(
    cursor: Annotated[str | None, Query(max_length=256, description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Paging:
    return Paging(cursor, limit)


Paged = Annotated[Paging, Depends(_paging)]


_CURSOR_DIGITS = 19
"""As of the store's lists: numbers of more are of none."""


def slice_of(items: list[Any], paging: Paging) -> tuple[list[Any], str | None]:
    """A page of what one attempt left: its payload is read whole and bounded by the task's limits and
    what a worker keeps, so it is in memory. The cursor is an index."""
    cursor = paging.cursor or "0"
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < _CURSOR_DIGITS):
        raise InvalidInput("not a cursor of this list", field="cursor")
    start = int(cursor)
    end = start + paging.limit
    return items[start:end], str(end) if end < len(items) else None


async def disconnected(receive: Receive) -> None:
    """Until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        continue


def accepts(model: type[Any]) -> dict[str, Any]:
    """OpenAPI's description of a body that the route reads by itself (``bodies.body``)."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}-Input"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(name: str, *kinds: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of an answer that is no pydantic model."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {200: {"content": {kind: {"schema": schema} for kind in kinds}}}


_NAME = re.compile(NAME_PATTERN)
_SHOWN_CHARS = 60
_ANY_TEXT = "path"
"""The one part of a path that is no id or name: a file's path in an attempt's artifacts."""

_OTHER = "other"


def _check_ids(request: Request) -> None:
    """Every id and name of ours has one form: the store is not asked for another. Raises ``NotFound`` for one
    in the path, ``InvalidInput`` for one in the query."""
    for name, value in request.path_params.items():
        if name != _ANY_TEXT and not _NAME.fullmatch(str(value)):
            raise NotFound(_no_id(str(value)), field=name)
    for name, value in request.query_params.multi_items():
        if (name.endswith("_id") or name == _OTHER) and not _NAME.fullmatch(value):
            raise InvalidInput(_no_id(value), field=name)


def _no_id(value: str) -> str:
    more = "…" if len(value) > _SHOWN_CHARS else ""
    return f"{value[:_SHOWN_CHARS]!r}{more} is no id or name of anything"


class StrictRoute(APIRoute):
    """Refuses query parameters it does not have: a misspelt filter must not list everything. And ids that can
    be nobody's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = set(_query_names(self.dependant))

        async def strict(request: Request) -> Response:
            for name in request.query_params:
                if name not in known:
                    return problem_response(UnknownName("query parameter", name, known, field=name))
            try:
                _check_ids(request)
            except RollserveError as error:
                return problem_response(error)
            return await handle(request)

        return strict


def _query_names(dependant: Dependant) -> list[str]:
    own = [param.alias for param in dependant.query_params]
    return own + [name for inner in dependant.dependencies for name in _query_names(inner)]
