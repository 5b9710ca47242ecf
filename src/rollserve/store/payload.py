"""The contract of the *payload store*: calls, log and artifacts of an attempt, in files beside the
database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollserve.records.call import Call
from rollserve.records.rollout import Attempt


class SealedPayload(msgspec.Struct, frozen=True, kw_only=True):
    """``ref`` is the payload's address in its store; ``counts`` are those of the attempt, where its
    worker could not tell them."""

    ref: str
    size_bytes: int
    counts: dict[str, int] = {}

    def of(self, attempt: Attempt) -> Attempt:
        """The attempt, with this as its payload."""
        update = {"payload": self.ref, "payload_bytes": self.size_bytes}
        return attempt.model_copy(update=update | ({"counts": self.counts} if self.counts else {}))


class EndState(msgspec.Struct, frozen=True, kw_only=True):
    """What a grader got to see of an attempt beside its calls: the whole answer, and two tar archives of
    the files carried over (``rollouts.keepsakes``), ``paths`` None where these were not kept."""

    answer: str | None = None
    paths: tuple[str, ...] | None = None
    workspace: bytes = b""
    root: bytes = b""


class AttemptPayload(msgspec.Struct, kw_only=True):
    """All that was kept of an attempt, in the order it happened. ``end`` None: its agent did not come to an
    end."""

    calls: list[Call] = []
    log: list[tuple[float, str]] = []
    artifacts: dict[str, bytes] = {}
    call_rewards: dict[str, float] = {}
    end: EndState | None = None


class Segment(Protocol):
    """The live, append-only record of one attempt. ``append_*`` return once the frame is handed to
    the operating system; a torn last frame is ignored by readers."""

    def append_call(self, call: Call) -> None: ...
    def append_log(self, line: str) -> None: ...
    def append_artifact(self, path: str, data: bytes) -> None: ...
    def append_call_rewards(self, rewards: dict[str, float]) -> None: ...
    def append_end(self, end: EndState) -> None: ...

    async def seal(self) -> SealedPayload:
        """Pack, compress, and make durable; the live file is gone afterwards."""

    def leave(self) -> None:
        """Close it as it stands, for whoever salvages it. Idempotent."""

    def discard(self) -> None:
        """Drop it (an attempt that never began). Idempotent."""


class PayloadStore(Protocol):
    def open_segment(self, run_id: str, attempt_id: str) -> Segment: ...

    async def read(self, ref: str) -> AttemptPayload:
        """Raises ``NotFound`` when it was pruned."""

    async def read_live(self, run_id: str, attempt_id: str) -> AttemptPayload:
        """What a running attempt has recorded so far; empty when nothing."""

    async def salvage(self, run_id: str, attempt_id: str) -> SealedPayload | None:
        """Seal what an attempt had recorded whose worker is gone; what it had sealed itself stays as it
        is. None when there is nothing. Raises ``InfrastructureFailure`` when the disk refuses."""

    async def delete(self, refs: Sequence[str]) -> None: ...

    async def sweep(self, known: set[str]) -> int:
        """At start-up: remove live segments of dead attempts and sealed payloads not in ``known``;
        returns how many."""
