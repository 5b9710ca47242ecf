"""Routes of a run, and of a re-grading: checked before anything is started."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from rollserve.errors import InvalidInput, NotFound, UnknownName
from rollserve.records.policy import BackendState, Policy
from rollserve.records.regrade import JudgeRoute
from rollserve.records.run import RunSpec
from rollserve.rollouts.policies import Policies

Check = Callable[[str, str], Awaitable[Policy]]
"""The policy of a name. Raises for one that is not there or can't be read, with the field."""


async def check_routes(spec: RunSpec, own: Policy, check: Check, field: str = "routes") -> None:
    """Raises ``InvalidInput`` at ``<field>.<name>`` or below."""
    aside: str | None = None
    for name, route in spec.routes.items():
        where = f"{field}.{name}"
        if name in (own.spec.name, own.spec.model):
            raise InvalidInput("is what the run's own policy is asked by: take another name", field=where)
        policy = await check(route.policy, f"{where}.policy")
        if route.train and policy.spec.interface == "text":
            raise InvalidInput(
                f"nothing of policy {route.policy!r} can be trained: its backends give text, and no tokens",
                field=f"{where}.train",
            )
        if not route.side_calls:
            continue
        if "run" not in route.stages:
            raise InvalidInput("agents make side calls, and may not ask it", field=f"{where}.side_calls")
        if aside is not None:
            raise InvalidInput(f"{aside!r} answers side calls already", field=f"{where}.side_calls")
        aside = name


LOOKED_AT = 8
"""Backends of one policy, until one answers."""


def judge_routes(run: RunSpec) -> dict[str, JudgeRoute]:
    """Those of a run that its graders may ask."""
    return {
        name: JudgeRoute(policy=route.policy, sampling=route.sampling)
        for name, route in run.routes.items()
        if "grade" in route.stages
    }


async def check_judges(routes: Mapping[str, JudgeRoute], policies: Policies) -> None:
    """Raises ``InvalidInput`` at ``routes.<name>.policy`` for a policy that is not there, or of which no
    backend answers with its model just now."""
    for name, route in routes.items():
        where = f"routes.{name}.policy"
        try:
            policy = await policies.get(route.policy)
        except NotFound as error:
            known = [each.spec.name for each in (await policies.page()).items]
            raise UnknownName("policy", route.policy, known, field=where) from error
        if policy.update is not None and policy.update.open:
            continue  # its backends may be paused: the calls wait
        await _check_answers(route.policy, where, policies)


async def _check_answers(policy: str, where: str, policies: Policies) -> None:
    usable = (BackendState.ACTIVE, BackendState.FAILED)
    there = [backend for backend in await policies.registered(policy) if backend.state in usable]
    there.sort(key=lambda backend: usable.index(backend.state))
    troubles = []
    for backend in there[:LOOKED_AT]:
        found = await policies.check(policy, backend.id)
        if found.ok:
            return
        troubles.append(found.detail)
    message = f"policy {policy!r} has no backend that could answer"
    raise InvalidInput(
        "; ".join([message, *troubles]),
        field=where,
        hint="register one, or leave the route out where the grader asks nobody",
    )
