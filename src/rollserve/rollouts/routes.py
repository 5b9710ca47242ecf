"""A run's routes: checked before anything is started."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollserve.errors import InvalidInput
from rollserve.records.policy import Policy
from rollserve.records.run import RunSpec

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
