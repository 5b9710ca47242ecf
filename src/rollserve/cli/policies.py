"""``rollserve policy …``: policies and the inference servers behind them."""

from __future__ import annotations

from typing import Any

from rollserve.addresses import root_of
from rollserve.cli.connect import connect, look
from rollserve.cli.obstacles import of_backends, policy_state
from rollserve.cli.options import Where
from rollserve.cli.output import err, out, print_json, table
from rollserve.client import Client
from rollserve.errors import InvalidInput, NotFound, listed, nearest
from rollserve.records.policy import Backend, BackendState, Policy
from rollserve.wire import CreatePolicy, RegisterBackend


async def list_policies(where: Where, *, limit: int, cursor: str | None, as_json: bool) -> None:
    async with look(where) as client:
        found = await client.policies(limit=limit, cursor=cursor)
        known = [(each, await client.backends(each.spec.name)) for each in found.items]
    if as_json:
        print_json({"policies": [_json(*each) for each in known], "next": found.next})
        return
    if not known:
        out.print("no policy; `rollserve policy create NAME --model MODEL --tokenizer DIR` makes one")
        return
    rows = [
        (p.spec.name, p.spec.model, p.version, policy_state(p.paused, _active(b)), len(b), _active(b))
        for p, b in known
    ]
    table(("policy", "model", "version", "state", "backends", "active"), rows)
    if found.next:
        out.print(f"more: `rollserve policy list --cursor {found.next}`", soft_wrap=True)
    for policy, backends in known:
        _say(policy, backends)


def _active(backends: list[Backend]) -> int:
    return sum(backend.state is BackendState.ACTIVE for backend in backends)


def _json(policy: Policy, backends: list[Backend]) -> dict[str, Any]:
    described = [backend.model_dump(mode="json") for backend in backends]
    return {**policy.model_dump(mode="json"), "backends": described}


def _say(policy: Policy, backends: list[Backend]) -> None:
    for each in of_backends(policy, backends):
        err.print(str(each), style="yellow", markup=False, soft_wrap=True)


async def show(where: Where, name: str, *, as_json: bool) -> None:
    async with look(where) as client:
        policy, backends = await client.policy(name), await client.backends(name)
    if as_json:
        print_json(_json(policy, backends))
        return
    spec = policy.spec
    paused = ", paused" if policy.paused else ""
    out.print(f"policy {spec.name}: version {policy.version}{paused}", markup=False)
    renderer = " ".join([spec.renderer.name, *(f"{k}={v}" for k, v in spec.renderer.options.items())])
    out.print(
        f"model {spec.model}, tokenizer {spec.tokenizer}, renderer {renderer}", markup=False, soft_wrap=True
    )
    if backends:
        rows = [(b.id, b.spec.url, b.spec.kind.value, b.state.value, b.error) for b in backends]
        table(("backend", "url", "kind", "state", "error"), rows)
    _say(policy, backends)


async def create(where: Where, spec: CreatePolicy, *, as_json: bool) -> None:
    async with connect(where) as client:
        policy = await client.create_policy(spec)
        backends = await client.backends(spec.name)
    if as_json:
        print_json(policy.model_dump(mode="json"))
        return
    out.print(f"policy {spec.name} is there, at version {policy.version}", markup=False)
    _say(policy, backends)


async def add_backend(where: Where, name: str, spec: RegisterBackend, *, as_json: bool) -> None:
    async with connect(where) as client:
        backend = await client.register_backend(name, spec)
    if as_json:
        print_json(backend.model_dump(mode="json"))
        return
    info = backend.info
    out.print(
        f"backend {backend.id}: {spec.url}, {info.engine}, logprobs {info.logprobs_mode}",
        markup=False,
        soft_wrap=True,
    )
    for warning in info.warnings:
        err.print(warning, style="yellow", markup=False, soft_wrap=True)


async def remove_backend(where: Where, name: str, which: str, *, as_json: bool) -> None:
    async with connect(where) as client:
        backend = await _find(client, name, which)
        await client.remove_backend(name, backend.id)
    if as_json:
        print_json({"removed": backend.id, "url": backend.spec.url})
    else:
        out.print(f"backend {backend.id} ({backend.spec.url}) is removed", markup=False, soft_wrap=True)


async def drain_backend(where: Where, name: str, which: str, *, as_json: bool) -> None:
    async with connect(where) as client:
        backend = await _find(client, name, which)
        await client.drain_backend(name, backend.id)
    if as_json:
        print_json({"draining": backend.id, "url": backend.spec.url})
        return
    out.print(f"backend {backend.id} ({backend.spec.url}) gets no more calls", markup=False, soft_wrap=True)
    back = f"`rollserve policy add-backend {name} {backend.spec.url}` takes it back"
    out.print(back, markup=False, soft_wrap=True)


async def _find(client: Client, policy: str, which: str) -> Backend:
    """By its id or its URL, with or without ``/v1``. Raises ``NotFound``, of the policy too."""
    known = await client.backends(policy)
    for backend in known:
        if which == backend.id or (_root(which) or which) == _root(backend.spec.url):
            return backend
    names = [name for backend in known for name in (backend.id, backend.spec.url)]
    hint = nearest(which, names, cutoff=0.8) or listed(names)
    raise NotFound(f"policy {policy!r} has no backend {which!r}", field="backend_id", hint=hint)


def _root(url: str) -> str | None:
    try:
        return root_of(url)
    except InvalidInput:
        return None


async def set_paused(where: Where, name: str, paused: bool, *, as_json: bool) -> None:
    async with look(where) as client:
        policy = await (client.pause_policy(name) if paused else client.resume_policy(name))
    if as_json:
        print_json(policy.model_dump(mode="json"))
    elif paused:
        out.print(f"policy {name} is paused: no rollout starts, no call is made", markup=False)
    else:
        out.print(f"policy {name} goes on", markup=False)
