"""Runs: opened, paused, closed, pruned."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from rollserve.errors import Conflict, InvalidInput, NotFound, UnknownName
from rollserve.records.base import new_id
from rollserve.records.policy import Policy
from rollserve.records.run import Run, RunSpec, RunState, SourceStatus
from rollserve.records.sample import is_reward
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.cancel import Cancelled, Canceller
from rollserve.rollouts.control import check_spec
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.routes import check_routes
from rollserve.rollouts.templates import Templates
from rollserve.store.values import Bin, Page
from rollserve.webhooks import check_secret

_MAX_KEY = 200
_CLOSED = "the run was closed"

WORKERS_LEAVE_OUT = {"source", "callback"}
"""Of a run's specification: nothing to a worker."""


def checked_key(key: str | None) -> str | None:
    """An idempotency key, or ``InvalidInput`` for one that can't be kept."""
    if key is None:
        return None
    if not 0 < len(key) <= _MAX_KEY or not key.isprintable():
        raise InvalidInput(f"1 to {_MAX_KEY} printable characters", field="Idempotency-Key")
    return key


class RunSpecs:
    """Specs by run, and as the JSON that workers get: a run's spec never changes, and the scheduler
    asks for it at every start and end of an attempt."""

    _KEPT = 1024

    def __init__(self, ports: Ports) -> None:
        self._store = ports.store
        self._known: OrderedDict[str, tuple[RunSpec, bytes]] = OrderedDict()

    async def get(self, run_id: str) -> tuple[RunSpec, bytes]:
        """Raises ``NotFound``."""
        known = self._known.get(run_id)
        if known is None:
            spec = (await self._store.get_run(run_id)).spec
            told = spec.model_dump_json(exclude=WORKERS_LEAVE_OUT)
            known = self._known[run_id] = (spec, told.encode())
            while len(self._known) > self._KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(run_id)
        return known

    def forget(self, run_id: str) -> None:
        self._known.pop(run_id, None)


class Runs:
    """``opened`` makes a run's task source. ``changed`` is rung when work may start that could not before;
    ``happened`` on any event."""

    def __init__(
        self,
        ports: Ports,
        specs: RunSpecs,
        canceller: Canceller,
        templates: Templates,
        *,
        opened: Callable[[RunSpec], Awaitable[SourceStatus | None]],
        changed: Bell,
        happened: Bell,
    ) -> None:
        self._store = ports.store
        self._payloads = ports.payloads
        self._clock = ports.clock
        self._specs = specs
        self._canceller = canceller
        self._templates = templates
        self._check_function = ports.check_function
        self._check_url = ports.poster.check
        self._most_rollouts = ports.settings.api.max_rollouts_per_group
        self._opened = opened
        self._changed = changed
        self._happened = happened
        self._opening = asyncio.Lock()

    async def open(self, spec: RunSpec, key: str | None = None, callback_secret: str | None = None) -> Run:
        """With ``key`` the request may be sent again: the run of then comes back. Raises
        ``UnknownName`` for a policy that is not there, ``InvalidInput`` for one that can't be read,
        ``Conflict`` for a key used with another spec or secret."""
        key = checked_key(key)
        # A subclass (a request's body) would equal no stored specification.
        spec = RunSpec.model_validate(spec.model_dump(include=set(RunSpec.model_fields)))
        await self._check(spec)
        self._check_callback(spec, callback_secret)
        run = Run(id=new_id("run"), spec=spec, created_at=self._clock.now())
        if key is None:
            return await self._create(run, callback_secret)
        run = run.model_copy(update={"id": f"run_{hashlib.sha256(key.encode()).hexdigest()[:20]}"})
        async with self._opening:
            try:
                known = await self._store.get_run(run.id)
            except NotFound:
                return await self._create(run, callback_secret)
        if known.spec != spec or await self._store.callback_secret(run.id) != callback_secret:
            raise Conflict("this key opened a run with other settings", field="Idempotency-Key")
        return known

    async def _create(self, run: Run, callback_secret: str | None) -> Run:
        run = await self._store.create_run(run, await self._opened(run.spec), callback_secret)
        self._changed.ring()
        self._happened.ring()
        return run

    async def _check(self, spec: RunSpec) -> None:
        for kind, reward in dict(spec.failure_rewards).items():
            if not is_reward(reward):
                raise InvalidInput("a reward must be finite as float32", field=f"failure_rewards.{kind}")
        check_spec(spec, most_rollouts=self._most_rollouts)
        for index, rule in enumerate(spec.filters):
            if ":" in rule.name:
                await self._check_function(rule.name, f"filters.{index}.name")
        own = await self._check_policy(spec.policy, "policy")
        await check_routes(spec, own, self._check_policy)

    def _check_callback(self, spec: RunSpec, secret: str | None) -> None:
        if spec.callback is None:
            if secret is not None:
                raise InvalidInput("there is no callback that it could be for", field="callback_secret")
            return
        self._check_url(spec.callback.url, "callback.url")
        if secret is None:
            raise InvalidInput("a callback is signed with it", field="callback_secret")
        check_secret(secret, "callback_secret")

    async def _check_policy(self, name: str, field: str) -> Policy:
        try:
            return await self._templates.check(name, field)
        except NotFound as error:
            known = [policy.spec.name for policy in (await self._store.list_policies()).items]
            raise UnknownName("policy", name, known, field=field) from error

    async def get(self, run_id: str) -> Run:
        return await self._store.get_run(run_id)

    async def page(
        self, *, state: RunState | None, newest: bool, cursor: str | None, limit: int
    ) -> Page[Run]:
        return await self._store.list_runs(state=state, newest=newest, cursor=cursor, limit=limit)

    async def counts(self, run_id: str) -> dict[str, int]:
        await self._specs.get(run_id)
        return await self._store.run_counts(run_id)

    async def bins(self, run_id: str) -> dict[str, dict[str, Bin]]:
        """What became of its tokens, and its other histograms."""
        return await self._store.run_bins(run_id)

    async def source(self, run_id: str) -> SourceStatus | None:
        return await self._store.source(run_id)

    async def pause(self, run_id: str) -> Run:
        """Nothing new starts; what runs goes on."""
        return await self._set(run_id, RunState.PAUSED)

    async def resume(self, run_id: str) -> Run:
        return await self._set(run_id, RunState.OPEN)

    async def _set(self, run_id: str, state: RunState) -> Run:
        run = await self._store.get_run(run_id)
        if run.state is not state:
            run = await self._store.set_run_state(run_id, state)
            self._changed.ring()
            self._happened.ring()
        return run

    async def close(self, run_id: str) -> tuple[Run, Cancelled]:
        """No more groups; what is queued or running is cancelled. Finished groups stay deliverable."""
        before = await self._canceller.cancel(run_id=run_id, reason=_CLOSED)
        run = await self._set(run_id, RunState.CLOSED)
        after = await self._canceller.cancel(run_id=run_id, reason=_CLOSED)  # what came in between
        return run, Cancelled(ended=before.ended + after.ended, stopping=after.stopping)

    async def prune(self, run_id: str) -> int:
        """Forget a closed run with all its data; returns how many payloads went. Raises ``Conflict``
        when it is not closed or rollouts still run."""
        payloads = await self._store.prune_run(run_id)
        self._specs.forget(run_id)
        await self._payloads.delete(payloads)
        self._happened.ring()
        return len(payloads)
