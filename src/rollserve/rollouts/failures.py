"""Who was at fault: code that is not ours raises plain Python; one context manager classifies it."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from rollserve.errors import EpisodeFailure, InfrastructureFailure, InvalidInput, UnknownName
from rollserve.records.rollout import Failure

_MESSAGE_CHARS = 2000


@contextmanager
def boundary(
    operation: str,
    failure: type[EpisodeFailure],
    *,
    passes: type[Exception] | tuple[type[Exception], ...] = InfrastructureFailure,
    log: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """What is raised inside and is not of ``passes`` leaves as ``failure``, its traceback in ``log``. Of what
    is a ``failure`` already, raised on purpose, ``log`` gets the message: it holds the traceback of the
    user's code, where there is one, and ours would only hide it.

    A ``CancelledError`` that nobody asked for (a task of the code inside was cancelled) is a crash
    like any other.
    """
    try:
        yield
    except passes:
        raise
    except failure as error:
        if log is not None:
            log(error.message)
        raise
    except Exception as error:
        _trace(error, log)
        raise _as(failure, error, operation) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        _trace(error, log)
        raise _as(failure, error, operation) from error


@contextmanager
def usable(operation: str, failure: type[EpisodeFailure], log: Callable[[str], None]) -> Iterator[None]:
    """Around what takes up the user's code. It was looked at when it was submitted: what is refused now
    was edited since, and is its own ``failure``. A name that this worker does not know is not."""
    try:
        yield
    except UnknownName:
        raise
    except InvalidInput as error:
        log(str(error))
        raise failure(str(error)[:_MESSAGE_CHARS], operation=operation) from error


def _trace(error: BaseException, log: Callable[[str], None] | None) -> None:
    if log is not None:
        log("".join(traceback.format_exception(error, limit=-8)).rstrip())


def _as(failure: type[EpisodeFailure], error: BaseException, operation: str) -> EpisodeFailure:
    text = str(error) or "no message"
    return failure(f"{type(error).__name__}: {text}"[:_MESSAGE_CHARS], operation=operation)


def failure_of(error: EpisodeFailure) -> Failure:
    return Failure(
        kind=error.kind,
        code=error.code,
        message=str(error)[:_MESSAGE_CHARS],
        operation=error.operation,
    )


def plain_json(value: Any, limit_bytes: int) -> Any:
    """``value`` as data that JSON can hold, or a note that says why it is not kept."""
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        return {"not_kept": f"not JSON: {error}"[:500]}
    if len(encoded) > limit_bytes:
        return {"not_kept": f"{len(encoded)} bytes, over the limit of {limit_bytes}"}
    return json.loads(encoded)
