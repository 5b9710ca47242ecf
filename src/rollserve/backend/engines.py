"""Is it one engine, or something that stands before several?

A router passes a generation on to one engine. What must reach all of them (an abort, a new weight version,
a pause) reaches one at most, and logprobs and versions that were probed are those of whichever engine
answered. So a router is refused at registration; its engines are registered one by one, and the pool does
what the router did.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from rollserve.backend.http import MAX_METRICS_BYTES, Answer, Http
from rollserve.backend.probing import ask
from rollserve.errors import BackendError, InvalidInput

_LISTS = ("/workers", "/list_workers", "/engines")
"""Of SGLang's gateway and vLLM's router, of their predecessors, and of vLLM's production stack."""

_LOOKS = 3
_STARTED = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)
_SHOWN = 8


async def refuse_router(http: Http) -> None:
    """Raises ``InvalidInput`` (field ``url``) when what answers lists engines of its own, or answers from
    more than one process."""
    for path in _LISTS:
        listed = _listed(await ask(http, path))
        if listed is not None:
            raise _router(http, f"it lists {len(listed)} engines at {path}", listed)
    started = {found for _ in range(_LOOKS) if (found := await _start(http)) is not None}
    if len(started) > 1:
        raise _router(http, f"{_LOOKS} looks at /metrics were answered by {len(started)} processes", [])


async def refuse_without_abort(http: Http, path: str, body: bytes) -> None:
    """``body`` aborts a request that there is not. Raises ``InvalidInput`` (field ``url``) when the server
    has no such route, as routers have none."""
    try:
        answer = await http.control(path, body)
    except BackendError as error:
        raise InvalidInput(f"{http.url}{path}: {error.message}", field="url") from error
    if answer.status in (404, 405):
        raise InvalidInput(
            f"{http.url} generates, but can't abort: POST {path} gave HTTP {answer.status}",
            field="url",
            hint="where this is a router, register the engines behind it; else use a newer server",
        )


async def _start(http: Http) -> bytes | None:
    answer = await ask(http, "/metrics", max_bytes=MAX_METRICS_BYTES)
    found = _STARTED.search(answer.body) if answer.status == 200 else None
    return found[1] if found else None


def _listed(answer: Answer) -> list[str] | None:
    """The engines in a router's list, by address or name; None when the answer is no such list."""
    if answer.status != 200:
        return None
    try:
        body: Any = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(body, dict):
        body = next((body[key] for key in ("workers", "urls", "engines") if key in body), None)
    if not isinstance(body, list):
        return None
    names = [_name(each) for each in body]
    return [name for name in names if name is not None] if None not in names else None


def _name(engine: Any) -> str | None:
    if isinstance(engine, str):
        return engine
    if isinstance(engine, dict):
        found = engine.get("url") or engine.get("engine_id") or engine.get("id")
        return found if isinstance(found, str) else None
    return None


def _router(http: Http, how: str, engines: Iterable[str]) -> InvalidInput:
    some = list(engines)
    named = ", ".join(some[:_SHOWN]) + (", …" if len(some) > _SHOWN else "")
    return InvalidInput(
        f"{http.url} is a router, not an engine ({how}): an abort, a weight version or a pause would "
        "reach one of its engines, not all",
        field="url",
        hint=f"register its engines one by one: {named}" if named else "register its engines one by one",
    )
