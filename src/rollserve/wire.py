"""Bodies of the HTTP API, used by ``api`` and ``client`` alone. Paths are in ``docs/api.md``.

Answers without arrays are JSON. Token-heavy answers (deliveries, samples, calls) are JSON or msgpack
by ``Accept``: in msgpack an array is ``{"dtype", "shape", "data"}`` with little-endian bytes, in JSON
``data`` is a (nested) list instead.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SecretStr

from rollserve.records.base import NAME_PATTERN, Name, Record
from rollserve.records.call import Break, Call, Drift, Label, Message, SamplingParams, VersionSpan
from rollserve.records.control import GroupRule
from rollserve.records.delivery import Checkpoint, Lease
from rollserve.records.export import ExportSettings
from rollserve.records.image import PlacedImage
from rollserve.records.policy import MAX_VERSION, Backend, BackendSpec, PolicySpec
from rollserve.records.regrade import JudgeRoutes, Regrade
from rollserve.records.rollout import Attempt, Group, Rollout
from rollserve.records.run import Run, RunSpec, SourceStatus
from rollserve.records.sample import Sample, TokenReport
from rollserve.records.task import GraderSpec, Task
from rollserve.records.update import UpdateMode

JSON = "application/json"
MSGPACK = "application/msgpack"
PROBLEM = "application/problem+json"

T = TypeVar("T")


class Problem(Record):
    """RFC 9457. ``code`` is stable; ``field`` the dotted path of the input at fault."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    field: str | None = None
    hint: str | None = None


class CreatePolicy(PolicySpec):
    pass


class SetVersion(Record):
    """``label`` is what backends call these weights; the version's decimal text when left out."""

    version: Annotated[int, Field(ge=0, le=MAX_VERSION)]
    label: Annotated[str, Field(min_length=1, max_length=256)] | None = None


LeaseSeconds = Annotated[float, Field(ge=1, le=86400)]


class BeginUpdate(Record):
    """``mode`` says what becomes of calls in flight. Without a renewal or a commit within ``lease_s`` the
    backends go on at the version they had."""

    mode: UpdateMode = UpdateMode.DRAIN
    lease_s: LeaseSeconds = 300.0


class CommitUpdate(Record):
    """``label`` is what backends will call these weights; the version's decimal text when left out.
    ``canary`` are the trainer's logprobs of the update's ``canary_ids``, of each but the first, at
    temperature 1. ``adapter_path`` is where backends whose model is an adapter load it from."""

    version: Annotated[int, Field(ge=0, le=MAX_VERSION)]
    label: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    canary: Annotated[list[Annotated[float, Field(le=1e-3)]], Field(max_length=1024)] | None = None
    adapter_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


class RenewUpdate(Record):
    """Without ``lease_s``, for as long as before."""

    lease_s: LeaseSeconds | None = None


class RegisterBackend(BackendSpec):
    pass


class BackendStatus(Record):
    """What a look at a backend found just now."""

    backend: Backend
    ok: bool
    detail: str = ""


class OpenRun(RunSpec):
    """``callback_secret`` (``whsec_`` and 24 to 64 bytes in base64) signs what is sent to ``callback``. It is
    kept with the run and told nobody."""

    callback_secret: SecretStr | None = None


class ResendMessages(Record):
    """``ids`` None: all dead messages of the run."""

    ids: Annotated[list[str], Field(min_length=1, max_length=500)] | None = None


class Resent(Record):
    """So many messages are sent again."""

    messages: int


class BinCount(Record):
    """So many attempts, rollouts or groups, with what they sampled."""

    count: int
    tokens: int


class RunStatus(Record):
    """``counts`` are rollouts and groups by state. ``bins`` by kind: ``tokens`` (what became of every
    sampled token; all together are what was sampled), ``staleness`` (rollouts handed over, by versions
    behind), ``stale_length`` (too old, by sampled tokens of the episode), ``groups`` (left out by filter,
    stopped, carried over, …)."""

    run: Run
    counts: dict[str, int]
    bins: dict[str, dict[str, BinCount]] = {}
    source: SourceStatus | None = None


class RunClosed(Record):
    """``ended`` rollouts were queued and are over; ``stopping`` are being stopped by their worker."""

    run: Run
    ended: int
    stopping: int


class Pruned(Record):
    """How many attempts' payloads were deleted with the run."""

    payloads: int


class GroupBody(Record):
    """``rule`` says when the group is over; without it the run's does."""

    task: Task
    num_rollouts: Annotated[int, Field(ge=1)] = 1
    rule: GroupRule | None = None


class SubmitGroups(Record):
    """With the header ``Idempotency-Key`` the request may be sent again: the same groups come back."""

    groups: Annotated[list[GroupBody], Field(min_length=1)]


class Checked(Record):
    """All of so many groups could be run."""

    groups: int


class Submitted(Record):
    groups: list[GroupSummary]


class GroupSummary(Record):
    id: str
    num_rollouts: int
    state: str


class GroupStatus(Record):
    """``counts`` are its rollouts by state."""

    group: Group
    counts: dict[str, int]


class RolloutStatus(Record):
    """``stage`` is where a running rollout is now. ``attempts`` is how many there were, those that are
    not held against the rollout included."""

    rollout: Rollout
    task: Task
    stage: str | None = None
    attempts: int
    last_attempt: Attempt | None


class Cancelled(Record):
    """``ended`` were queued and are over; ``stopping`` are being stopped by their worker."""

    ended: int
    stopping: int


class LeaseGroups(Record):
    """Up to ``max_groups`` finished groups, that sampled up to ``max_tokens`` tokens in usable rollouts
    (one group always goes); waits up to ``wait_s`` seconds for the first."""

    trainer: Annotated[str, Field(pattern=NAME_PATTERN)] = "default"
    epoch: Annotated[int | None, Field(ge=0)] = None
    max_groups: Annotated[int, Field(ge=1, le=4096)] = 16
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**63)] = None
    wait_s: Annotated[float, Field(ge=0, le=60)] = 20.0
    ttl_s: Annotated[float | None, Field(gt=0, le=86400)] = None


class RenewLease(Record):
    ttl_s: Annotated[float | None, Field(gt=0, le=86400)] = None


class CommitCheckpoint(Record):
    name: Name
    epoch: Annotated[int, Field(ge=0)]
    cursor: Annotated[str, Field(max_length=65536)] | None = None


class Rewind(Record):
    """``name`` None rewinds to the run's beginning."""

    name: Name | None = None


class Rewound(Record):
    epoch: int
    policy_version: int
    checkpoint: Checkpoint | None


class BeginRegrade(Record):
    """Grade the run's stored attempts once more, by ``grader``, which may ask ``routes``; None: those that
    the run has for graders."""

    grader: GraderSpec
    routes: JudgeRoutes | None = None


class RegradeStatus(Record):
    """``counts`` are its gradings by state."""

    regrade: Regrade
    counts: dict[str, int]


class RegradeCancelled(Record):
    """So many gradings will not be made."""

    cancelled: int


class ExportGroups(ExportSettings):
    """Pages of at most ``limit`` groups looked at, fewer where they are large."""

    cursor: Annotated[str | None, Field(max_length=256)] = None
    limit: Annotated[int, Field(ge=1, le=256)] = 32


class TrainerStatus(Record):
    """``epoch`` grows with each rewind; what asks with an older one is fenced."""

    trainer: str
    epoch: int


class Listing(Record, Generic[T]):
    """A page of anything; ``next`` is the cursor of the one after it."""

    items: list[T]
    next: str | None = None


class Artifact(Record):
    path: str
    size_bytes: int


class ServerStatus(Record):
    """The live view's data: counters only grow, ``stages`` are attempts by stage over all workers,
    ``backends`` and ``policies`` the first 1000. Of a policy: ``name``, ``version``, ``paused``, how many
    ``backends`` it has and how many of them are ``active``; both null where they were not all counted.
    ``callbacks`` are messages of all runs by state, and how many callbacks are ``stopped``."""

    version: str
    uptime_s: float
    workers: list[dict[str, Any]]
    stages: dict[str, int]
    slots: dict[str, int]
    counters: dict[str, float]
    queued: int
    running: int
    loop_lag_ms_p99: float
    backends: list[dict[str, Any]]
    policies: list[dict[str, Any]] = []
    callbacks: dict[str, int] = {}


class Array(msgspec.Struct, frozen=True):
    """A numpy array on the wire; ``data`` is bytes (msgpack) or a nested list (JSON)."""

    dtype: str
    shape: list[int]
    data: Any


class WireSample(msgspec.Struct, frozen=True, kw_only=True):
    """``records.sample.Sample`` on the wire."""

    rollout_id: str
    rollout_index: int
    index: int
    count: int
    weight: float
    arrays: dict[str, Array]
    extras: dict[str, Array]
    reward: float | None
    exact: bool
    cause: str | None
    text: str | None
    truncated_by: str | None
    mixed_versions: bool
    inferred_versions: bool
    call_ids: list[str]
    images: tuple[PlacedImage, ...] = ()
    policy: str = ""


class DeliveredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """``rollout`` is ``records.rollout.Rollout`` as JSON-compatible data. ``note`` says why a rollout
    that should have samples has none, or what of them is not trained; ``tokens`` what became of those that
    were sampled. ``staleness``: versions between its oldest trained token and the policy's now; ``stale``:
    more than the run's bound."""

    rollout: dict[str, Any]
    samples: list[WireSample]
    note: str | None = None
    tokens: TokenReport | None = None
    staleness: int | None = None
    stale: bool = False


class DeliveredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """``group`` is ``records.rollout.Group`` as JSON-compatible data."""

    group: dict[str, Any]
    rollouts: list[DeliveredRollout]


class ExportedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """``left_out``: why it has no rollouts here."""

    group: dict[str, Any]
    rollouts: list[DeliveredRollout]
    left_out: str | None = None


class ExportPage(msgspec.Struct, frozen=True, kw_only=True):
    groups: list[ExportedGroup]
    next: str | None = None


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """``lease`` is ``records.delivery.Lease`` as data; None when nothing finished in time (then
    ``groups`` is empty). ``policy_version`` is the policy's at the time of the answer. ``over``: nothing
    will come any more; a code (``run_closed``, ``source_ended``, ``source_failed``) and why."""

    lease: dict[str, Any] | None
    groups: list[DeliveredGroup]
    policy_version: int
    over: tuple[str, str] | None = None


class CallbackData(msgspec.Struct, frozen=True, kw_only=True):
    """``delivery`` with ``group.finished`` alone: one group, leased."""

    run_id: str
    detail: dict[str, Any] = {}
    delivery: Delivery | None = None


class CallbackBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent to a run's callback, always as JSON. ``timestamp`` (ISO 8601) is when it happened."""

    type: str
    timestamp: str
    data: CallbackData


class WireCall(msgspec.Struct, frozen=True, kw_only=True):
    """``records.call.Call`` on the wire; ``arrays`` are prompt_ids, sampled_ids and logprobs."""

    id: str
    parent: str | None
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    arrays: dict[str, Array]
    extras: dict[str, Array]
    versions: tuple[VersionSpan, ...]
    reply: Message
    finish_reason: str
    sampling: SamplingParams
    asked: dict[str, Any]
    backend: str
    logprobs_mode: str
    constrained: bool
    broke: Break | None
    inexact: str | None
    label: Label
    origin: str | None
    drift: tuple[Drift, ...]
    policy: str
    route: str
    started_at: float
    first_token_at: float | None
    finished_at: float
    images: tuple[PlacedImage, ...] = ()


class RecordedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A page of an attempt's calls, in the order they were made. ``live``: it still runs."""

    attempt_id: str | None
    live: bool
    items: list[WireCall]
    next: str | None = None


class TrajectoryNode(msgspec.Struct, frozen=True, kw_only=True):
    """A call without its tokens: what it added, what came back, how much it was."""

    id: str
    parent: str | None
    messages: tuple[Message, ...]
    reply: Message
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    versions: tuple[VersionSpan, ...]
    broke: Break | None
    inexact: str | None
    label: Label
    origin: str | None
    drift: tuple[Drift, ...]
    policy: str
    route: str
    seconds: float


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt to read: the tree of its calls (a page of it), and root to newest call as one
    conversation. ``total`` is how many calls there are."""

    attempt_id: str | None
    live: bool
    total: int
    calls: list[TrajectoryNode]
    conversation: list[Message]
    next: str | None = None


def parse_lease(delivery: Delivery) -> Lease | None:
    return None if delivery.lease is None else Lease.model_validate(delivery.lease)


_ARRAYS = ("ids", "loss_mask", "logprobs", "versions", "rewards")
Form = Literal["msgpack", "json"]


def _to_array(value: NDArray[np.generic], form: Form) -> Array:
    little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
    data: Any = little.tobytes() if form == "msgpack" else little.tolist()
    return Array(little.dtype.str.lstrip("<|"), list(little.shape), data)


def _from_array(array: Array) -> NDArray[Any]:
    dtype = np.dtype(array.dtype).newbyteorder("<")
    if isinstance(array.data, (bytes, bytearray, memoryview)):
        return np.frombuffer(array.data, dtype=dtype).reshape(array.shape)
    return np.asarray(array.data, dtype=dtype).reshape(array.shape)


def to_wire_call(call: Call, form: Form) -> WireCall:
    arrays = {
        "prompt_ids": np.frombuffer(call.prompt_ids, "<i4"),
        "sampled_ids": np.frombuffer(call.sampled_ids, "<i4"),
        "logprobs": np.frombuffer(call.logprobs, "<f4"),
    }
    extras = {name: np.frombuffer(data, np.uint8) for name, data in call.extras.items()}
    return WireCall(
        id=call.id,
        parent=call.parent,
        messages=call.messages,
        tools=call.tools,
        arrays={name: _to_array(value, form) for name, value in arrays.items()},
        extras={name: _to_array(value, form) for name, value in extras.items()},
        versions=call.versions,
        reply=call.reply,
        finish_reason=call.finish_reason,
        sampling=call.sampling,
        asked=call.asked,
        backend=call.backend,
        logprobs_mode=call.logprobs_mode,
        constrained=call.constrained,
        broke=call.broke,
        inexact=call.inexact,
        label=call.label,
        origin=call.origin,
        drift=call.drift,
        policy=call.policy,
        route=call.route,
        started_at=call.started_at,
        first_token_at=call.first_token_at,
        finished_at=call.finished_at,
        images=call.images,
    )


def to_node(call: Call) -> TrajectoryNode:
    return TrajectoryNode(
        id=call.id,
        parent=call.parent,
        messages=call.messages,
        reply=call.reply,
        finish_reason=call.finish_reason,
        prompt_tokens=len(call.prompt_ids) // 4,
        sampled_tokens=len(call.sampled_ids) // 4,
        versions=call.versions,
        broke=call.broke,
        inexact=call.inexact,
        label=call.label,
        origin=call.origin,
        drift=call.drift,
        policy=call.policy,
        route=call.route,
        seconds=max(0.0, call.finished_at - call.started_at),
    )


def to_wire(sample: Sample, form: Form) -> WireSample:
    return WireSample(
        rollout_id=sample.rollout_id,
        rollout_index=sample.rollout_index,
        index=sample.index,
        count=sample.count,
        weight=sample.weight,
        arrays={name: _to_array(getattr(sample, name), form) for name in _ARRAYS},
        extras={name: _to_array(value, form) for name, value in sample.extras.items()},
        reward=sample.reward,
        exact=sample.exact,
        cause=sample.cause,
        text=sample.text,
        truncated_by=sample.truncated_by,
        mixed_versions=sample.mixed_versions,
        inferred_versions=sample.inferred_versions,
        call_ids=list(sample.call_ids),
        images=sample.images,
        policy=sample.policy,
    )


def from_wire(wire: WireSample) -> Sample:
    arrays = {name: _from_array(wire.arrays[name]) for name in _ARRAYS}
    return Sample(
        rollout_id=wire.rollout_id,
        rollout_index=wire.rollout_index,
        index=wire.index,
        count=wire.count,
        weight=wire.weight,
        reward=wire.reward,
        exact=wire.exact,
        cause=wire.cause,
        text=wire.text,
        truncated_by=wire.truncated_by,
        mixed_versions=wire.mixed_versions,
        inferred_versions=wire.inferred_versions,
        call_ids=tuple(wire.call_ids),
        images=wire.images,
        policy=wire.policy,
        extras={name: _from_array(value) for name, value in wire.extras.items()},
        **arrays,
    )


Submitted.model_rebuild()
