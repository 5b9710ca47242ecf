"""Updates of a policy's weights: begun, leased, committed, by the one trainer that has the update's id.

    begin → workers send nothing, engines are paused → the trainer changes the weights, its own way
          → commit: label, prefix caches, engines go on, canary, version → workers go on

Only the policy's own backends are touched. A trainer that does not come back parks nothing: its lease ends,
the engines go on, and the policy stays at the version it had. What is begun is stored first, so that a
server which starts again ends it too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from functools import partial

from rollserve.errors import (
    Conflict,
    InvalidInput,
    LeaseLost,
    NotFound,
    RollserveError,
    StaleEpoch,
    VersionRegression,
)
from rollserve.records.base import new_id
from rollserve.records.policy import Backend, BackendState, Policy
from rollserve.records.update import Canary, UpdateMode, UpdateState, WeightUpdate
from rollserve.rollouts.canary import Judgement
from rollserve.rollouts.engines import Engines
from rollserve.rollouts.fencing import Fencing, fitting_ids
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.pages import every
from rollserve.rollouts.patience import patiently
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.ports import Ports

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""For leases that have ended."""

TELL_EVERY_S = 10.0
"""For engines that did not hear that they may go on."""


class Updates:
    """``run`` until cancelled; ``close`` ends what runs in the background."""

    def __init__(self, ports: Ports, policies: Policies, fleet: Fleet) -> None:
        self._ports = ports
        self._store = ports.store
        self._clock = ports.clock
        self._policies = policies
        self._engines = Engines(ports, policies, fleet)
        self._fencing = Fencing(ports, policies)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._pausing: dict[str, asyncio.Task[None]] = {}
        self._tell_at: dict[str, float] = {}

    # ── what a trainer asks for

    async def begin(self, name: str, mode: UpdateMode, lease_s: float) -> WeightUpdate:
        """Raises ``Conflict`` while another is open or without backends, ``InvalidInput`` where a backend
        can't be updated so. The answer comes before the backends are paused: ``ready`` says they are."""
        async with self._locks[name]:
            policy = await self._store.get_policy(name)
            if policy.update is not None and policy.update.open:
                raise Conflict(
                    f"update {policy.update.id} of {name!r} is open, until it is committed or its lease ends",
                    hint="abort it if its trainer is gone",
                )
            backends = await self._policies.registered(name)
            if not any(backend.state is not BackendState.DRAINING for backend in backends):
                raise Conflict(f"policy {name!r} has no backends to update", field="backends")
            checked, warnings = await self._engines.able(backends, mode)
            update = self._made(policy, mode, lease_s, checked, warnings)
            await self._store.set_policy_update(name, update)
            await self._policies.tell(name)
            self._start_pausing(update)
            return update

    def _made(
        self, policy: Policy, mode: UpdateMode, lease_s: float, backends: list[Backend], words: list[str]
    ) -> WeightUpdate:
        now = self._clock.now()
        wanted = self._ports.settings.backends.canary
        return WeightUpdate(
            id=new_id("up"),
            policy=policy.spec.name,
            mode=mode,
            lease_s=lease_s,
            begun_at=now,
            expires_at=now + lease_s,
            from_version=policy.version,
            weights=policy.weights,
            backends=[backend.id for backend in backends],
            canary_ids=fitting_ids(backends) if wanted else [],
            detail="; ".join(words),
        )

    async def get(self, name: str, update_id: str) -> WeightUpdate:
        """The policy's last update; older ones are events."""
        return _its(await self._store.get_policy(name), update_id)

    async def renew(self, name: str, update_id: str, lease_s: float | None) -> WeightUpdate:
        """Raises ``LeaseLost`` when it is over."""
        async with self._locks[name]:
            update = _open(await self._store.get_policy(name), update_id)
            lease_s = lease_s or update.lease_s
            renewed = update.model_copy(
                update={"lease_s": lease_s, "expires_at": self._clock.now() + lease_s}
            )
            await self._store.set_policy_update(name, renewed)
            return renewed

    async def abort(self, name: str, update_id: str) -> WeightUpdate:
        """The weights are what they were: go on. The same again is answered the same."""
        async with self._locks[name]:
            update = _its(await self._store.get_policy(name), update_id)
            if update.state is UpdateState.ABORTED:
                return update
            _check_open(update)
            return await self._give_up(update, UpdateState.ABORTED, "aborted by the trainer")

    async def commit(
        self,
        name: str,
        update_id: str,
        version: int,
        label: str | None,
        figures: list[float] | None,
        adapter_path: str | None = None,
    ) -> Policy:
        """The same again is answered the same. With ``adapter_path`` each backend loads it. Raises
        ``LeaseLost`` when it is over, ``Conflict`` before it is ready or when backends disagree,
        ``VersionRegression``, ``StaleEpoch`` after a rewind, ``InvalidInput`` (fields ``canary``,
        ``adapter_path``), ``BackendUnavailable`` when no backend can be told."""
        async with self._locks[name]:
            policy = await self._store.get_policy(name)
            known = _its(policy, update_id)
            if known.state is UpdateState.COMMITTED and known.version == version:
                return policy
            _check_open(known)
            label = label or str(version)
            self._check_commit(policy, known, version, label, figures)
            told = await self._engines.announce(known, label, adapter_path)
            judgement = await self._fencing.judge(policy, version, figures)
            done = known.model_copy(
                update={"state": UpdateState.COMMITTED, "version": version, "label": label}
            )
            policy = await self._store.commit_policy_update(name, done, _canary(judgement))
            await self._fencing.fence(name, judgement, absent=set(known.backends) - told, of=known)
            await self._resumed(done, told)
            return await self._policies.tell(name)

    def _check_commit(
        self, policy: Policy, update: WeightUpdate, version: int, label: str, figures: list[float] | None
    ) -> None:
        name = policy.spec.name
        if update.state is UpdateState.PAUSING:
            raise Conflict(f"update {update.id} is not ready: the backends are being paused", field="state")
        if update.expires_at <= self._clock.now():
            raise LeaseLost(f"the lease of update {update.id} has ended", hint="begin another")
        if policy.weights != update.weights:
            raise StaleEpoch(f"policy {name!r} was rewound since update {update.id} was begun")
        if version < policy.version:
            raise VersionRegression(f"policy {name!r} is at version {policy.version}", field="version")
        if policy.labels.get(label, version) != version:
            raise Conflict(f"label {label!r} already means version {policy.labels[label]}", field="label")
        wanted = max(0, len(update.canary_ids) - 1)
        if figures is not None and len(figures) != wanted:
            message = f"{len(figures)} logprobs; canary_ids have {wanted} after the first"
            raise InvalidInput(message, field="canary")

    async def set_version(self, name: str, version: int, label: str | None) -> Policy:
        """The simple way, without a pause: the backends serve this version already. They are checked once
        it is announced. Raises as ``Policies.set_version`` does."""
        async with self._locks[name]:
            before = await self._store.get_policy(name)
            policy = await self._policies.set_version(name, version, label)
            if policy.weights == before.weights:
                return policy
            judgement = await self._fencing.judge(policy, version, None)
            if judgement is None or judgement.undecided or not judgement.canary.backends:
                return policy
            await self._store.set_policy_canary(name, judgement.canary)
            await self._fencing.fence(name, judgement)
            return await self._policies.tell(name)

    # ── the pause

    def _start_pausing(self, update: WeightUpdate) -> None:
        task = asyncio.create_task(self._pause(update), name=f"pause {update.policy}")
        self._pausing[update.id] = task
        task.add_done_callback(lambda _: self._pausing.pop(update.id, None))

    async def _pause(self, update: WeightUpdate) -> None:
        """Until every backend is paused; those that don't answer are left out. Ends the update where that
        can't be done."""
        try:
            paused = await self._engines.pause(update)
        except RollserveError as error:
            async with self._locks[update.policy]:
                current = (await self._store.get_policy(update.policy)).update
                if current is not None and current.id == update.id and current.open:
                    await self._give_up(current, UpdateState.ABORTED, f"the pause failed: {error.message}")
            return
        async with self._locks[update.policy]:
            current = (await self._store.get_policy(update.policy)).update
            if current is None or current.id != update.id or current.state is not UpdateState.PAUSING:
                return
            ready = current.model_copy(update={"state": UpdateState.READY, "backends": paused})
            await patiently(self._clock, partial(self._store.set_policy_update, update.policy, ready))
        await self._policies.tell(update.policy)

    # ── the end of an update

    async def _give_up(self, update: WeightUpdate, state: UpdateState, detail: str) -> WeightUpdate:
        """At the old version; backends that do not serve it any more are fenced off. Under the lock."""
        pausing = self._pausing.get(update.id)
        if pausing is not None and pausing is not asyncio.current_task():
            pausing.cancel()
        over = update.model_copy(
            update={"state": state, "detail": "; ".join(word for word in (update.detail, detail) if word)}
        )
        store = self._store
        await patiently(self._clock, partial(store.set_policy_update, update.policy, over))
        log.warning("update %s of %s is %s: %s", update.id, update.policy, state.value, detail)
        over = await self._go_on(over)
        judgement = await self._fencing.restored(update)
        if judgement is not None:
            await patiently(self._clock, partial(store.set_policy_canary, update.policy, judgement.canary))
            await self._fencing.fence(update.policy, judgement)
        await self._policies.tell(update.policy)
        return over

    async def _go_on(self, update: WeightUpdate) -> WeightUpdate:
        return await self._resumed(update, await self._engines.resume(update))

    async def _resumed(self, update: WeightUpdate, told: set[str]) -> WeightUpdate:
        """Remember whether all have heard it: ``run`` asks the others again, as long as they are there."""
        there = {backend.id for backend in await self._policies.registered(update.policy)}
        if not set(update.backends) & there <= told:
            return update
        done = update.model_copy(update={"resumed": True})
        await patiently(self._clock, partial(self._store.set_policy_update, update.policy, done))
        return done

    # ── life

    async def run(self) -> None:
        """Take up what an earlier server left open, then end leases and reach engines that were away."""
        for policy in await every(self._store.list_policies):
            update = policy.update
            if update is not None and update.state is UpdateState.PAUSING:
                self._start_pausing(update)
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            try:
                await self._look()
            except RollserveError:
                log.exception("updates of weights can't be looked at")

    async def _look(self) -> None:
        for policy in await every(self._store.list_policies):
            update = policy.update
            if update is None or update.resumed:
                continue
            due = update.expires_at if update.open else self._tell_at.get(update.policy, 0.0)
            if due <= self._clock.now():
                self._tell_at[update.policy] = self._clock.now() + TELL_EVERY_S
                await self._end(update)

    async def _end(self, seen: WeightUpdate) -> None:
        async with self._locks[seen.policy]:
            update = (await self._store.get_policy(seen.policy)).update
            if update is None or update.id != seen.id or update.resumed:
                return
            if not update.open:
                await self._go_on(update)
            elif update.expires_at <= self._clock.now():
                detail = f"the trainer did not commit within its lease; version {update.from_version} goes on"
                await self._give_up(update, UpdateState.EXPIRED, detail)

    async def close(self) -> None:
        tasks = list(self._pausing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _its(policy: Policy, update_id: str) -> WeightUpdate:
    if policy.update is None or policy.update.id != update_id:
        last = "it has none" if policy.update is None else f"the last one is {policy.update.id}"
        raise NotFound(
            f"{update_id!r} is not the last update of policy {policy.spec.name!r}",
            field="update_id",
            hint=last,
        )
    return policy.update


def _open(policy: Policy, update_id: str) -> WeightUpdate:
    update = _its(policy, update_id)
    _check_open(update)
    return update


def _check_open(update: WeightUpdate) -> None:
    if not update.open:
        raise LeaseLost(f"update {update.id} is {update.state.value}: {update.detail or 'it is over'}")


def _canary(judgement: Judgement | None) -> Canary | None:
    return None if judgement is None else judgement.canary
