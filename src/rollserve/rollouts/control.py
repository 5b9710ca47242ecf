"""Settings of a run that contradict each other, found before anything is started. Pure."""

from __future__ import annotations

from rollserve.errors import InvalidInput, UnknownName
from rollserve.records.control import FilterRule, GroupRule
from rollserve.records.run import RunSpec

RULES = ("zero_variance", "too_hard", "too_easy")
"""Filters of our own; anything with a colon is a Python function."""


def check_spec(spec: RunSpec, *, most_rollouts: int) -> None:
    """Raises ``InvalidInput`` naming the field."""
    source = spec.source
    check_rule(
        spec.groups,
        spec,
        num_rollouts=source.num_rollouts if source else None,
        most_rollouts=most_rollouts,
        field="groups",
    )
    for index, rule in enumerate(spec.filters):
        _check_filter(rule, f"filters.{index}")
    _check_pace(spec)
    if source is not None:
        _check_source(spec)
    if spec.purpose == "evaluation":
        _check_evaluation(spec)


def check_rule(
    rule: GroupRule, spec: RunSpec, *, num_rollouts: int | None, most_rollouts: int, field: str
) -> None:
    """``num_rollouts`` None: not known yet."""
    if spec.purpose == "evaluation":
        _check_whole(rule, field)
    if rule.stragglers == "cancel" and rule.min_usable is None:
        _refuse("stragglers = cancel needs to know how many are enough", f"{field}.min_usable")
    if rule.stragglers == "replace" and rule.straggler_s is None:
        _refuse("stragglers = replace needs to know when one is late", f"{field}.straggler_s")
    if rule.stragglers == "replace" and spec.retry.max_attempts == 1:
        _refuse("retry.max_attempts = 1 allows no other try", f"{field}.stragglers")
    if rule.stragglers != "replace" and rule.straggler_s is not None:
        _refuse("only stragglers = replace uses it", f"{field}.straggler_s")
    if rule.straggler_s is not None and rule.deadline_s is not None and rule.straggler_s >= rule.deadline_s:
        _refuse(f"the group is over after {rule.deadline_s:g} s (deadline_s)", f"{field}.straggler_s")
    if num_rollouts is None:
        return
    if rule.min_usable is not None and rule.min_usable > num_rollouts:
        _refuse(f"the group has {num_rollouts} rollouts (num_rollouts)", f"{field}.min_usable")
    if num_rollouts + rule.oversample > most_rollouts:
        _refuse(f"at most {most_rollouts} rollouts a group, oversampled ones included", f"{field}.oversample")


def _check_whole(rule: GroupRule, field: str) -> None:
    """In an evaluation every rollout runs to its own end: to leave out the slow ones would be a bias."""
    asked = {
        "min_usable": rule.min_usable is not None,
        "oversample": rule.oversample > 0,
        "deadline_s": rule.deadline_s is not None,
        "stragglers": rule.stragglers == "cancel",
    }
    for name, given in asked.items():
        if given:
            _refuse(
                "an evaluation lets every rollout end by itself (a task's limits bound it)", f"{field}.{name}"
            )


def _check_filter(rule: FilterRule, field: str) -> None:
    python = ":" in rule.name
    if not python and rule.name not in RULES:
        raise UnknownName("filter", rule.name, RULES, field=f"{field}.name")
    if python and rule.threshold is not None:
        _refuse("a Python function gets its settings as options", f"{field}.threshold")
    if not python and rule.options:
        _refuse(f"{rule.name} has a threshold and no options", f"{field}.options")


def _check_pace(spec: RunSpec) -> None:
    rule, target = spec.staleness, spec.source.target_groups if spec.source else None
    if rule.groups_per_version is None:
        return
    if rule.max_staleness is None:
        _refuse("pacing needs a bound (staleness.max_staleness)", "staleness.groups_per_version")
    if target is not None and target != rule.groups_per_version:
        _refuse(
            f"the source's target_groups are {target} for one version: it is the same number",
            "staleness.groups_per_version",
        )


def _check_source(spec: RunSpec) -> None:
    source = spec.source
    if source is None:
        return
    if source.path is not None and source.tasks:
        _refuse("a path or tasks: one of them", "source.path")
    if source.path is None and not source.tasks and source.curriculum is None:
        _refuse("a path, tasks or a curriculum", "source.path")
    if source.curriculum is None and source.curriculum_options:
        _refuse("without a curriculum nobody reads them", "source.curriculum_options")
    if source.curriculum is not None:
        if source.epochs != 1:
            _refuse("a curriculum says itself when it is done", "source.epochs")
        if source.shuffle_seed is not None:
            _refuse("a curriculum says itself in which order", "source.shuffle_seed")
    if source.target_groups is None:
        if source.carry_over:
            _refuse("without target_groups nothing is carried over", "source.carry_over")
        if source.extra_groups:
            _refuse("without target_groups in_flight says how many are open", "source.extra_groups")


def _check_evaluation(spec: RunSpec) -> None:
    """All that is evaluated is delivered."""
    if spec.filters:
        _refuse("an evaluation leaves no group out", "filters")
    if spec.source is not None and spec.source.target_groups is not None:
        _refuse("an evaluation takes every task", "source.target_groups")
    if spec.staleness.max_staleness is not None:
        _refuse("an evaluation leaves nothing out as too old", "staleness.max_staleness")


def _refuse(message: str, field: str) -> None:
    raise InvalidInput(message, field=field)
