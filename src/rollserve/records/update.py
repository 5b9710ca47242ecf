"""An update of a policy's weights: begun, then committed, aborted or expired; and what the canary found."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from rollserve.records.base import Record


class UpdateMode(StrEnum):
    """What becomes of the calls in flight: they end first (*drain*), they are stopped and go on from the
    tokens they had under the new weights (*abort*), or they stand still in the engine and go on there
    (*keep*)."""

    DRAIN = "drain"
    ABORT = "abort"
    KEEP = "keep"


class UpdateState(StrEnum):
    """``pausing``: the backends are being paused. ``ready``: they are, and the trainer may change their
    weights. The others are final."""

    PAUSING = "pausing"
    READY = "ready"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"


class WeightUpdate(Record):
    """``weights`` is how often the policy's had changed when it was begun: another trainer's rewind changes
    it, and fences this update. ``backends`` are those that were paused, ``canary_ids`` the tokens whose
    logprobs (of each but the first) a trainer may send with the commit. ``detail`` says what went wrong.
    ``resumed``: every backend has been told to go on."""

    id: str
    policy: str
    mode: UpdateMode
    state: UpdateState = UpdateState.PAUSING
    lease_s: float
    begun_at: float
    expires_at: float
    from_version: int
    weights: int
    backends: list[str]
    canary_ids: list[int] = []
    version: int | None = None
    label: str | None = None
    detail: str = ""
    resumed: bool = False

    @property
    def open(self) -> bool:
        return self.state in (UpdateState.PAUSING, UpdateState.READY)


class BackendFinding(Record):
    """``agrees``: its logprobs are the expected ones. ``differs``: they are others. ``unmoved``: they are
    still those it had before the update. ``unscored``: it gave none, ``detail`` says why. ``difference`` is
    the mean over tokens of how far they are from the expected ones."""

    verdict: Literal["agrees", "differs", "unmoved", "unscored"]
    difference: float | None = None
    detail: str = ""


class Canary(Record):
    """What backends made of the canary's tokens under ``version``. ``verified``: by the trainer's figures, or
    by backends that agree with each other; ``unverified``: nothing to compare with; ``failed``: some do not
    serve what they claim. ``expected`` and ``scores`` (by backend id) are logprobs."""

    version: int
    verdict: Literal["verified", "unverified", "failed"]
    detail: str = ""
    at: float = 0.0
    backends: dict[str, BackendFinding] = {}
    expected: list[float] | None = None
    scores: dict[str, list[float]] = {}
