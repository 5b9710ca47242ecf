"""How a run is controlled: when a group is over, how old tokens may be, where tasks come from, which
groups are worth training, in which order they are handed over."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollserve.records.base import JsonObject, Record
from rollserve.records.task import Task

Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]


class GroupRule(Record):
    """When a group is over. A rollout is *usable* when it has a reward.

    ``oversample`` more rollouts than ``num_rollouts`` are started; once ``num_rollouts`` are usable the
    others are stopped. ``deadline_s`` runs on the wall clock from the start of the group's first rollout;
    what has not ended by then is stopped and the group is handed over as it is. A group with fewer than
    ``min_usable`` usable rollouts is *failed*: handed over with its reasons and without samples; it is
    given up as soon as it can't have them any more. ``stragglers``: wait for all (``wait``); stop the
    rest once ``min_usable`` are usable (``cancel``); stop a rollout that runs for ``straggler_s`` seconds
    and try it anew (``replace``), as long as the run's ``retry.max_attempts`` allows."""

    min_usable: Annotated[int | None, Field(ge=1, le=100_000)] = None
    oversample: Annotated[int, Field(ge=0, le=100_000)] = 0
    deadline_s: Seconds | None = None
    stragglers: Literal["wait", "cancel", "replace"] = "wait"
    straggler_s: Seconds | None = None


class StalenessRule(Record):
    """How far, in versions, the policy may be ahead of a sample's oldest sampled token when it is handed
    over. ``on_stale`` says what becomes of what is older: the group is passed over (``withhold``), the
    samples of such rollouts are left out (``drop``), such tokens are not trained (``mask``), or nothing
    but a mark (``mark``). With ``groups_per_version``, how many groups the trainer takes for one version,
    a group is started only if it can still be fresh enough when its turn comes."""

    max_staleness: Annotated[int | None, Field(ge=0, le=1_000_000)] = None
    on_stale: Literal["withhold", "drop", "mask", "mark"] = "drop"
    groups_per_version: Annotated[int | None, Field(ge=1, le=1_000_000)] = None


class FilterRule(Record):
    """Which finished groups are not worth training. ``zero_variance``: rewards differ by ``threshold``
    at most (0); ``too_hard``: their mean is ``threshold`` (0) at most; ``too_easy``: at least
    ``threshold`` (1). Or ``package.module:function``, called with ``rewards`` (a list, one a usable
    rollout), ``task`` (a dict) and ``options`` by name; false leaves the group out."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    threshold: Annotated[float | None, Field(allow_inf_nan=False)] = None
    options: JsonObject = {}


class TaskSource(Record):
    """Where the server takes a run's tasks from by itself: ``path`` is a JSONL file (a task a line) in the
    server's ``source_dir``; or ``tasks`` are they. ``epochs`` None: for ever. With ``shuffle_seed`` each
    epoch has an order of its own.

    ``target_groups`` are the informative groups (finished and not filtered) wanted for each version of
    the policy; once they are there, what is still open is stopped, or with ``carry_over`` goes on for the
    next version. ``extra_groups`` are open beyond what is needed. Without a target, ``in_flight`` groups
    are open at any time; it bounds them in any case.

    ``curriculum`` is a function (``package.module:function``) that is asked which tasks come next; ``path``
    or ``tasks`` are then what it may choose from, by number, and may be left out. It is called by name with
    ``wanted`` (how many at most), ``given`` (tasks so far), ``lines`` (tasks to choose from), ``results`` (of
    the newest groups that have ended) and ``options``. It returns a list of numbers or tasks, an empty one
    for nothing now, None when it is done."""

    path: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    tasks: Annotated[tuple[Task, ...], Field(max_length=256)] = ()
    curriculum: Annotated[str | None, Field(pattern=r"^[^:\s]+:[^:\s]+$", max_length=256)] = None
    curriculum_options: JsonObject = {}
    num_rollouts: Annotated[int, Field(ge=1, le=100_000)] = 8
    epochs: Annotated[int | None, Field(ge=1, le=1_000_000)] = 1
    shuffle_seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    on_broken_line: Literal["fail", "skip"] = "fail"
    target_groups: Annotated[int | None, Field(ge=1, le=100_000)] = None
    extra_groups: Annotated[int, Field(ge=0, le=100_000)] = 0
    in_flight: Annotated[int, Field(ge=1, le=100_000)] = 64
    carry_over: bool = False


class DeliveryRule(Record):
    """``order``: as groups finish (``ready``), or as they were submitted (``submit``), where a finished
    group waits ``max_wait_s`` seconds at most for earlier ones."""

    order: Literal["ready", "submit"] = "ready"
    max_wait_s: Seconds = 300.0
