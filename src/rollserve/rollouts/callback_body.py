"""What a callback's receiver is sent: JSON, with the group as a delivery hands it over. Pure.

Encoded rollout by rollout: one call of the encoder holds the interpreter for as long as it takes, thread or
not.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from rollserve.rollouts.delivery import Delivered
from rollserve.rollouts.staleness import FinishedGroup, FinishedRollout
from rollserve.wire import DeliveredRollout, to_wire


def body_of(
    event_type: str, run_id: str, at: float, detail: dict[str, Any], found: Delivered | None
) -> bytes:
    """``wire.CallbackBody``; ``at`` is when it happened, in seconds since the epoch."""
    data: dict[str, Any] = {"run_id": run_id, "detail": detail}
    if found is not None:
        data["delivery"] = {
            "lease": None if found.lease is None else found.lease.model_dump(mode="json"),
            "groups": [_group(group) for group in found.groups],
            "policy_version": found.policy_version,
        }
    moment = datetime.fromtimestamp(at, tz=UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"type": event_type, "timestamp": moment, "data": data})


def _group(group: FinishedGroup) -> dict[str, Any]:
    return {
        "group": group.group.model_dump(mode="json"),
        "rollouts": [msgspec.Raw(_rollout(rollout)) for rollout in group.rollouts],
    }


def _rollout(rollout: FinishedRollout) -> bytes:
    return msgspec.json.encode(
        DeliveredRollout(
            rollout=rollout.rollout.model_dump(mode="json"),
            samples=[to_wire(sample, "json") for sample in rollout.samples],
            note=rollout.note,
            tokens=rollout.tokens,
            staleness=rollout.staleness,
            stale=rollout.stale,
        )
    )
