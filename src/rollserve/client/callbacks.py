"""What a run's callback is sent, as the receiver sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rollserve.client.delivery import FinishedGroup, groups_of
from rollserve.client.http import Transport
from rollserve.errors import InvalidInput
from rollserve.webhooks import verify
from rollserve.wire import CallbackBody


@dataclass(frozen=True, slots=True)
class Callback:
    """One message. ``id`` is the same each time it is tried, and another once its trainer was rewound.
    ``type`` is ``group.finished`` (then ``groups`` has one, leased), ``run.closed``, ``source.ended`` or
    ``source.failed``; ``detail`` says more of these."""

    id: str
    type: str
    timestamp: str
    run_id: str
    groups: list[FinishedGroup]
    detail: dict[str, Any]


def read_callback(transport: Transport, secret: str, headers: Mapping[str, str], body: bytes) -> Callback:
    """Raises ``Unauthenticated`` for what is not signed with ``secret``, ``InvalidInput`` for what no server
    of this version sends."""
    message_id = verify(secret, headers, body)
    try:
        found = msgspec.json.decode(body, type=CallbackBody)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"not a callback's body: {error}") from error
    data = found.data
    groups = [] if data.delivery is None else groups_of(transport, data.delivery)
    return Callback(message_id, found.type, found.timestamp, data.run_id, groups, data.detail)
