"""Where a command begins and where its errors end: the one place that says what to do about them."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import typer
from pydantic import ValidationError

from rollserve import stopping
from rollserve.cli.output import fail
from rollserve.errors import ConfigError, NotFound, RollserveError, Unauthenticated, Unavailable

INTERRUPTED = 130
"""Exit code after Ctrl-C, SIGTERM or SIGHUP."""

_LISTS = {
    "run_id": "`rollserve run list` lists runs",
    "group_id": "`rollserve status RUN` lists rollouts with their groups, `rollserve run list` runs",
    "rollout_id": "`rollserve status RUN` lists rollouts, `rollserve run list` runs",
    "policy": "`rollserve policy list` lists policies",
    "backend_id": "`rollserve status` lists backends",
}
_NO_SERVER = "is it running? `rollserve serve` starts one; for another address: --url URL, or ROLLSERVE_URL"
_NO_KEY = "give the key that the server printed at its first start: --api-key KEY, or ROLLSERVE_API_KEY"
_NO_BACKEND = "is it up, and this its root, without /v1? `rollserve doctor --backend URL` looks at it"
_NAME = "a name has up to 128 letters, digits, dots, dashes and underscores; a letter or digit is the first"
_SHOWN_CHARS = 60

_SETTINGS = {
    "config": "--config FILE or ROLLSERVE_CONFIG names it; docs/operations.md lists what it may hold",
    "code_dir": "--code-dir DIR, ROLLSERVE_CODE_DIR or `code_dir` in the settings file names it",
    "data_dir": "--data-dir DIR, ROLLSERVE_DATA_DIR or `data_dir` in the settings file names another",
}


def hint_for(error: RollserveError) -> str | None:
    """What to type next: the error's own hint, and what only the command line knows."""
    from rollserve.client import Unreachable  # slow to import

    if isinstance(error, Unreachable):
        return _NO_SERVER
    if isinstance(error, Unauthenticated):
        return _NO_KEY
    if isinstance(error, NotFound) and error.field in _LISTS:
        return _joined(error.hint, _LISTS[error.field])
    if error.hint is None and error.field == "url":
        return _NO_BACKEND
    if error.hint is None and isinstance(error, ConfigError) and error.field in _SETTINGS:
        return _SETTINGS[error.field]
    if error.hint is None and isinstance(error, Unavailable):
        return "it may pass: `rollserve status` shows how busy the server is"
    return error.hint


def _joined(own: str | None, more: str) -> str:
    """A name that was found needs no list."""
    if own is None:
        return more
    return own if own.startswith("did you mean") or "`rollserve" in own else f"{own}; {more}"


def run_async(work: Coroutine[Any, Any, int | None]) -> None:
    """Ctrl-C and what ``stopping`` names cancel ``work``, which then cleans up. A code that is not 0 is the
    exit code."""
    with asyncio.Runner() as runner:
        try:
            code = runner.run(_stoppable(work))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    if code:
        raise typer.Exit(code)


async def _stoppable(work: Coroutine[Any, Any, int | None]) -> int | None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = stopping.asked_by()
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        return await work
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def run_app(app: Callable[[], None]) -> None:
    """Errors of ours, and values that no record takes, are one line, a hint and exit code 1; anything else is
    a traceback."""
    logging.getLogger("rollserve.client").addHandler(logging.NullHandler())  # errors are told here, once
    stopping.end_as_interrupted()  # what a command started ends with it
    try:
        app()
    except RollserveError as error:
        where = f"{error.field}: " if error.field else ""
        fail(f"{where}{error.message}", hint=hint_for(error))
        sys.exit(1)
    except ValidationError as error:
        message, hint = _refused(error)
        fail(message, hint=hint)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _refused(error: ValidationError) -> tuple[str, str | None]:
    """The first thing wrong: its field, the reason, and what was given."""
    from rollserve.records.base import NAME_PATTERN

    first = error.errors(include_url=False, include_context=True)[0]
    field = ".".join(str(each) for each in first["loc"]) or error.title
    given = "" if first["type"] == "missing" else f", got {repr(first['input'])[:_SHOWN_CHARS]}"
    named = first.get("ctx", {}).get("pattern") == NAME_PATTERN
    reason = "is no name" if named else first["msg"].removeprefix("Value error, ")
    return f"{field}: {reason}{given}", _NAME if named else None
