"""Why nothing moves, and what to type about it."""

from __future__ import annotations

from dataclasses import dataclass

from rollserve.client import Client
from rollserve.records.policy import Backend, BackendState, Policy
from rollserve.records.run import Run, RunState

_EXAMPLE = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """``what`` is in the way, ``remedy`` what to type; ``stops``: nothing goes on meanwhile."""

    what: str
    remedy: str
    stops: bool = True

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def of_run(run: Run) -> list[Obstacle]:
    if run.state is not RunState.PAUSED:
        return []
    return [Obstacle(f"run {run.id} is paused", f"`rollserve run resume {run.id}` lets it go on")]


def policy_state(paused: bool, active: int | None) -> str:
    """``active`` backends; None where they were not counted."""
    if paused:
        return "paused"
    return "not served" if active == 0 else "ready"


def of_policy(name: str, *, paused: bool, backends: int | None, active: int | None) -> list[Obstacle]:
    """From what the server's status says of it."""
    found = []
    if paused:
        found.append(
            Obstacle(f"policy {name!r} is paused", f"`rollserve policy resume {name}` lets it go on")
        )
    if backends == 0:
        remedy = f"register one: `rollserve policy add-backend {name} {_EXAMPLE}`"
        found.append(Obstacle(f"policy {name!r} has no backend", remedy))
    elif active == 0:
        remedy = f"`rollserve policy show {name}` says what is wrong with each"
        found.append(Obstacle(f"policy {name!r} has no healthy backend", remedy))
    return found


def of_backends(policy: Policy, backends: list[Backend]) -> list[Obstacle]:
    """Of the policy, and of each backend that takes no calls."""
    name = policy.spec.name
    active = [each for each in backends if each.state is BackendState.ACTIVE]
    found = of_policy(name, paused=policy.paused, backends=len(backends), active=len(active))
    return found + [_of_backend(each) for each in backends if each.state is not BackendState.ACTIVE]


def _of_backend(backend: Backend) -> Obstacle:
    url = backend.spec.url
    if backend.state is BackendState.DRAINING:
        remedy = f"`rollserve policy add-backend {backend.policy} {url}` takes it back"
        return Obstacle(f"backend {url} is being drained", remedy, stops=False)
    failed = backend.state is BackendState.FAILED
    what = "does not answer" if failed else "does not serve the weights it claims"
    why = f": {backend.error}" if backend.error else ""
    remedy = f"it is used again once it is well; `rollserve doctor --backend {url}` looks at it"
    return Obstacle(f"backend {url} {what}{why}", remedy, stops=False)


async def in_the_way(client: Client, run: Run) -> list[Obstacle]:
    """Of the run, the policies it asks, and the server. Raises what the server or its absence does."""
    found = of_run(run)
    for name in run.spec.policies:
        found += of_backends(await client.policy(name), await client.backends(name))
    if not (await client.status()).workers:
        found.append(Obstacle("the server has no worker", "its log says why; it starts another by itself"))
    return found
