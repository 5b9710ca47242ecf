"""The gateway of a worker: policies in, sessions out."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Any, NamedTuple

from rollserve.errors import AnothersSession, InfrastructureFailure, UnknownSecret
from rollserve.executor.base import PolicyView
from rollserve.gateway.answerers import OWN, Answerers, Served
from rollserve.gateway.base import Ending, SessionSpec
from rollserve.gateway.forward import Conversation, session_closed
from rollserve.gateway.images import ImageBounds
from rollserve.gateway.policies import PolicyState, PoolFactory, Renderings
from rollserve.gateway.sessions import GatewaySession
from rollserve.records.base import new_id
from rollserve.records.run import RunSpec

REMEMBERED = 65_536
"""Ended sessions whose secret is told from an unknown one; about 20 MB when full."""


class _Known(NamedTuple):
    session_id: str
    ending: Ending | None


class GatewayService:
    """``gateway.base.Gateway``. ``make_pool`` makes the pool of a policy; ``base_url`` is where
    ``gateway.http`` listens (set it once the port is known). Of ended sessions the newest
    ``remembered`` are kept by the digest of their secret. ``images`` bounds those of requests."""

    def __init__(
        self,
        make_pool: PoolFactory,
        *,
        base_url: str = "",
        remembered: int = REMEMBERED,
        images: ImageBounds | None = None,
    ) -> None:
        self.base_url = base_url
        self._images = images or ImageBounds()
        self._remembered = remembered
        self._over: OrderedDict[bytes, _Known] = OrderedDict()
        self._make_pool = make_pool
        self._policies: dict[str, PolicyState] = {}
        self._renderings = Renderings()
        self._sessions: dict[bytes, GatewaySession] = {}
        self._ended = {"calls": 0, "sampled_tokens": 0, "prompt_tokens": 0, "breaks": 0, "inexact": 0}

    def update_policy(self, view: PolicyView) -> None:
        """Take a policy's newer view; calls that wait on it go on when it allows."""
        name = view.policy().spec.name
        known = self._policies.get(name)
        if known is None:
            self._policies[name] = PolicyState(view, self._make_pool)
        else:
            known.update(view)

    async def open_session(self, spec: SessionSpec) -> GatewaySession:
        run, served = spec.run, dict[str, Served]()
        if spec.stage == "run":
            served[OWN] = await self._served(run.policy, run, OWN)
        for name, route in run.routes.items():
            if spec.stage in route.stages:
                served[name] = await self._served(route.policy, run, name)
        conversation = Conversation(new_id("ses"), spec, Answerers(run, served), self._images)
        session = GatewaySession(conversation, lambda: self.base_url, self._forget)
        self._sessions[_digest(session.secret)] = session
        return session

    async def _served(self, name: str, run: RunSpec, route: str) -> Served:
        policy = self._policies.get(name)
        if policy is None:
            raise InfrastructureFailure(
                f"policy {name!r} is not known here", operation="gateway.open_session"
            )
        spec = policy.policy.spec
        if spec.interface == "text":
            return Served(policy, route=route)
        if spec.interface == "chat":
            return Served(policy, tokenizer=await self._renderings.tokenizer(spec), route=route)
        rendering = await self._renderings.get(spec, run.thinking)
        return Served(policy, rendering, rendering.tokenizer, route)

    def session(self, secret: str, session_id: str | None = None) -> GatewaySession:
        """The open session of a secret; ``session_id`` is the one whose address was used, if any.
        Looked up by digest, so that time tells nothing of the secret. Raises ``UnknownSecret``,
        ``AnothersSession`` (the other may be open, over or none), ``SessionClosed`` with the ending."""
        digest = _digest(secret)
        session = self._sessions.get(digest)
        known = self._over.get(digest) if session is None else _Known(session.id, session.ended)
        if known is None:
            raise UnknownSecret("no session has this secret", hint="a secret is valid for one attempt")
        if session_id not in (None, known.session_id):
            raise AnothersSession(
                "the secret is not that of the session in the path", hint="use the base URL it came with"
            )
        if session is None or known.ending is not None:
            raise session_closed(known.ending or Ending.ENDED)
        return session

    def _forget(self, session: GatewaySession) -> None:
        digest = _digest(session.secret)
        self._sessions.pop(digest, None)
        self._over[digest] = _Known(session.id, session.ended)
        if len(self._over) > self._remembered:
            self._over.popitem(last=False)
        _add(self._ended, session.counts)

    def stats(self) -> dict[str, Any]:
        """Counters of all sessions, ended ones included; ``in_flight``, ``waiting`` and ``sessions``
        are of now. ``backends`` by id, over all policies."""
        totals = dict(self._ended)
        states = [session.conversation_state for session in self._sessions.values()]
        for state in states:
            _add(totals, state.counts)
        waiting = sum(state.waiting for state in states)
        in_flight = sum(state.in_flight for state in states) - waiting
        backends = {name: stats for p in self._policies.values() for name, stats in p.pool.stats().items()}
        now = {"sessions": len(states), "in_flight": in_flight, "waiting": waiting}
        return {**totals, **now, "backends": backends}

    async def close(self) -> None:
        await asyncio.gather(*(session.close(Ending.STOPPING) for session in list(self._sessions.values())))
        await asyncio.gather(*(policy.pool.close() for policy in self._policies.values()))
        await self._renderings.close()


def _add(totals: dict[str, int], counts: dict[str, int]) -> None:
    for name in totals:
        totals[name] += counts["turns" if name == "calls" else name]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
