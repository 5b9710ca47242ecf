"""Routes of a run, and of a re-grading: checked before anything is started."""

from __future__ import annotations

import asyncio
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

LOOKS_WITHIN_S = 20.0
"""Of all routes together: whoever sent the request waits for its answer."""


def judge_routes(run: RunSpec) -> dict[str, JudgeRoute]:
    """Those of a run that its graders may ask."""
    return {
        name: JudgeRoute(policy=route.policy, sampling=route.sampling)
        for name, route in run.routes.items()
        if "grade" in route.stages
    }


async def check_judges(
    routes: Mapping[str, JudgeRoute], policies: Policies, *, within_s: float = LOOKS_WITHIN_S
) -> None:
    """Each policy once, all at a time. Raises ``InvalidInput`` at ``routes.<name>.policy`` for one that is
    not there, or of which no backend answers with its model just now."""
    asked: dict[str, str] = {}
    for name, route in routes.items():
        asked.setdefault(route.policy, f"routes.{name}.policy")
    checks = (_check_judge(policy, where, policies, within_s) for policy, where in asked.items())
    for found in await asyncio.gather(*checks, return_exceptions=True):
        if found is not None:
            raise found


async def _check_judge(policy: str, where: str, policies: Policies, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            if not await _waited_for(policy, where, policies):
                await _check_answers(policy, where, policies)
    except TimeoutError as error:
        message = f"no backend of policy {policy!r} answered within {within_s:g} s"
        raise InvalidInput(message, field=where) from error


async def _waited_for(policy: str, where: str, policies: Policies) -> bool:
    """Amid an update of its weights its backends may be paused, and calls wait. Raises ``UnknownName``."""
    try:
        update = (await policies.get(policy)).update
    except NotFound as error:
        known = [each.spec.name for each in (await policies.page()).items]
        raise UnknownName("policy", policy, known, field=where) from error
    return update is not None and update.open


async def _check_answers(policy: str, where: str, policies: Policies) -> None:
    usable = (BackendState.ACTIVE, BackendState.FAILED)
    there = [backend for backend in await policies.registered(policy) if backend.state in usable]
    there.sort(key=lambda backend: usable.index(backend.state))
    troubles = await _troubles(policy, [backend.id for backend in there[:LOOKED_AT]], policies)
    if troubles is None:
        return
    message = f"policy {policy!r} has no backend that could answer"
    raise InvalidInput(
        "; ".join([message, *troubles]),
        field=where,
        hint="register one, or leave the route out where the grader asks nobody",
    )


async def _troubles(policy: str, backend_ids: list[str], policies: Policies) -> list[str] | None:
    """What is wrong with each; None as soon as one answers, however long the others would take."""
    looks = [asyncio.create_task(_trouble(policy, each, policies)) for each in backend_ids]
    try:
        for look in asyncio.as_completed(looks):
            if await look is None:
                return None
        return [trouble for look in looks if (trouble := look.result()) is not None]
    finally:
        for each in looks:
            each.cancel()
        await asyncio.gather(*looks, return_exceptions=True)


async def _trouble(policy: str, backend_id: str, policies: Policies) -> str | None:
    try:
        found = await policies.check(policy, backend_id)
    except NotFound as error:  # removed meanwhile
        return error.message
    return None if found.ok else found.detail
