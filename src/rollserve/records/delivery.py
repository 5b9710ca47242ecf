"""The leased hand-over of finished groups to a trainer: lease → ack → commit with its checkpoint."""

from __future__ import annotations

from rollserve.records.base import Record


class Lease(Record):
    """``id`` names the hand-over of the groups in it; all are acked, nacked and renewed together."""

    id: str
    run_id: str
    trainer: str
    epoch: int
    group_ids: list[str]
    expires_at: float


class Checkpoint(Record):
    """A trainer's checkpoint: what was acked before it is in it. ``policy_version`` is what a rewind
    sets the policy back to; ``cursor`` is the trainer's own, opaque; ``source_position`` the place of the
    run's task source on the server."""

    run_id: str
    trainer: str
    name: str
    seq: int
    policy_version: int
    cursor: str | None = None
    source_position: int | None = None
    created_at: float
