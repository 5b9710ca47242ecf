"""Every error of the API as ``application/problem+json``: a stable code, and the field at fault."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rollserve.errors import InvalidInput, RollserveError, UnknownName, nearest
from rollserve.wire import PROBLEM, Problem

log = logging.getLogger(__name__)

_TITLES = {
    400: "Bad request",
    401: "Unauthenticated",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Too large",
    429: "Too many requests",
    500: "Internal error",
    503: "Unavailable",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}


def problem_response(error: RollserveError) -> Response:
    problem = Problem(
        title=_TITLES.get(error.status, "Error"),
        status=error.status,
        code=error.code,
        detail=error.message,
        field=error.field,
        hint=error.hint,
    )
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        headers["Connection"] = "close"  # the rest of the body is not read
        return LingeringResponse(problem.model_dump_json(), error.status, headers, PROBLEM)
    return Response(problem.model_dump_json(), error.status, headers, PROBLEM)


class LingeringResponse(Response):
    """An answer to a request that is still being sent. Closing at once would reset the connection and
    take the answer with it, so a little more of the body is read, and thrown away, before."""

    LINGER_BYTES = 512 << 20
    LINGER_S = 2.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(self.LINGER_S):
                await self._drain(receive)
        except TimeoutError:
            log.debug("a client still sends a body that was refused")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self, receive: Receive) -> None:
        drained = 0
        while drained < self.LINGER_BYTES:
            message = await receive()
            drained += len(message.get("body", b""))
            if not message.get("more_body", False):
                return


def install(app: FastAPI) -> None:
    """Handle everything a route can raise."""
    app.add_exception_handler(RollserveError, _on_typed)
    app.add_exception_handler(RequestValidationError, _on_parameters)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(Exception, _on_bug)


async def _on_typed(request: Request, error: Exception) -> Response:
    if not isinstance(error, RollserveError):
        raise TypeError(f"not a typed error: {error!r}")
    if error.status >= 500 and error.status != 503:
        log.error("%s %s: %s", request.method, request.url.path, error, exc_info=error)
    return problem_response(error)


async def _on_parameters(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise TypeError(f"not a validation error: {error!r}")
    return problem_response(_first(error.errors(), None, skip=1))


async def _on_http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise TypeError(f"not an HTTP error: {error!r}")
    what = f"{request.method} {request.url.path}"
    detail = {404: f"no such route: {what}", 405: f"{request.url.path} does not take {request.method}"}
    problem = Problem(
        title=_TITLES.get(error.status_code, "Error"),
        status=error.status_code,
        code=_CODES.get(error.status_code, "http_error"),
        detail=detail.get(error.status_code, str(error.detail)),
        hint=_near_route(request) if error.status_code in _CODES else None,
    )
    headers = dict(error.headers or {})
    return Response(problem.model_dump_json(), error.status_code, headers, PROBLEM)


def _near_route(request: Request) -> str:
    """The path of as many parts that is nearest, with the request's own names in it."""
    parts = request.url.path.split("/")
    known = set()
    for template in request.app.openapi()["paths"]:
        words = template.split("/")
        if len(words) == len(parts):
            filled = (part if word.startswith("{") else word for word, part in zip(words, parts, strict=True))
            known.add("/".join(filled))
    near = nearest(request.url.path, known - {request.url.path}, cutoff=0.7)
    return f"{near} /docs has them all" if near else "see /docs"


async def _on_gone(_: Request, error: Exception) -> Response:
    log.debug("client went away: %s", error)
    return Response(status_code=400)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The edge: what nobody expected is logged whole, and told without its inside."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem_response(RollserveError(f"internal error ({type(error).__name__}); see the server's log"))


# -- validation errors


def invalid(error: ValidationError, model: type[BaseModel], prefix: str = "") -> InvalidInput:
    """The first thing wrong, with its dotted field and, for an unknown name, the nearest known one."""
    return _first(error.errors(include_url=False), model, prefix=prefix)


def _first(
    errors: Sequence[Any], model: type[BaseModel] | None, *, skip: int = 0, prefix: str = ""
) -> InvalidInput:
    # An unknown field explains a missing one (a typo in its name), so it goes first.
    first = next((item for item in errors if item["type"] == "extra_forbidden"), errors[0])
    loc = [part for part in first["loc"][skip:] if not _is_tag(part)]
    field = ".".join([*([prefix] if prefix else []), *(str(part) for part in loc)]) or None
    if first["type"] == "extra_forbidden" and model is not None:
        return UnknownName("field", str(loc[-1]), known_fields(model, loc[:-1]), field=field)
    hint = _nearest_choice(first)
    if first["type"] == "json_invalid":
        return InvalidInput(str(first["msg"]).replace("recursion limit exceeded", "nested too deep"))
    more = len(errors) - 1
    message = str(first["msg"]).removeprefix("Value error, ")
    return InvalidInput(f"{message} (and {more} more)" if more else message, field=field, hint=hint)


def _is_tag(part: object) -> bool:
    """Pydantic adds ``[key]`` for a dict's key and names of validators: no part of the input."""
    return isinstance(part, str) and (part == "[key]" or part.startswith("function-"))


def _nearest_choice(error: dict[str, Any]) -> str | None:
    if error["type"] not in ("enum", "literal_error") or not isinstance(error.get("input"), str):
        return None
    choices = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    return nearest(error["input"], choices)


def known_fields(model: type[BaseModel], path: Sequence[object]) -> list[str]:
    """The fields of the model found by following ``path`` (names and indexes) from ``model``."""
    here: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int) or here is None:
            continue
        field = here.model_fields.get(str(part))
        here = _model_in(field.annotation) if field is not None else here
    return list(here.model_fields) if here is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, dict, tuple, Union, types.UnionType):
        found = (_model_in(argument) for argument in get_args(annotation))
        return next((model for model in found if model is not None), None)
    return None
