"""Delivery by push: where a run's finished groups are sent, and what became of each message."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rollserve.records.base import Name, Record

CallbackEvent = Literal["group.finished", "run.closed", "source.ended", "source.failed"]

CALLBACK_EVENTS: tuple[CallbackEvent, ...] = ("group.finished", "run.closed", "source.ended", "source.failed")


class CallbackRule(Record):
    """Each of ``events`` is sent to ``url`` by a signed POST, until it is acknowledged (any 2xx).
    ``group.finished`` carries the group with its samples, leased to the trainer named ``trainer`` as a pull
    would lease it: commit and rewind are that trainer's."""

    url: Annotated[str, Field(min_length=1, max_length=2048, pattern=r"^[\x21-\x7e]+$")]
    events: Annotated[tuple[CallbackEvent, ...], Field(min_length=1, max_length=4)] = CALLBACK_EVENTS
    trainer: Name = "callback"


class CallbackState(StrEnum):
    """``STOPPED``: the receiver said 410. Nothing is sent until somebody has messages sent again."""

    ACTIVE = "active"
    STOPPED = "stopped"


class CallbackMessageState(StrEnum):
    """``SENDING``: a try is on its way. ``DEAD``: given up after its last try; it can be sent again.
    ``SKIPPED``: there is nothing to send (a pull took the group, or it was too old to be handed over)."""

    PENDING = "pending"
    SENDING = "sending"
    SENT = "sent"
    DEAD = "dead"
    SKIPPED = "skipped"


class CallbackMessage(Record):
    """``tries`` were made; the next is due at ``due_at``. ``status`` and ``error`` are of the last one."""

    id: str
    run_id: str
    type: str
    group_id: str | None = None
    state: CallbackMessageState
    tries: int
    created_at: float
    due_at: float
    ended_at: float | None = None
    status: int | None = None
    error: str | None = None


class CallbackStatus(Record):
    """``messages`` are counted by state. ``detail`` says why it was stopped."""

    rule: CallbackRule
    state: CallbackState
    detail: str = ""
    messages: dict[str, int]
