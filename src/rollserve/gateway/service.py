"""The gateway of a worker: policies in, sessions out."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from rollserve.errors import InfrastructureFailure
from rollserve.executor.base import PolicyView
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.forward import Conversation
from rollserve.gateway.policies import PolicyState, PoolFactory, Renderings
from rollserve.gateway.sessions import GatewaySession, new_session_id


class GatewayService:
    """``gateway.base.Gateway``. ``make_pool`` makes the pool of a policy; ``base_url`` is where
    ``gateway.http`` listens (set it once the port is known)."""

    def __init__(self, make_pool: PoolFactory, *, base_url: str = "") -> None:
        self.base_url = base_url
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
        policy = self._policies.get(spec.run.policy)
        if policy is None:
            raise InfrastructureFailure(
                f"policy {spec.run.policy!r} is not known here", operation="gateway.open_session"
            )
        rendering = await self._renderings.get(policy.policy.spec, spec.run.thinking)
        conversation = Conversation(new_session_id(), spec, policy, rendering)
        session = GatewaySession(conversation, lambda: self.base_url, self._forget)
        self._sessions[_digest(session.secret)] = session
        return session

    def session(self, secret: str) -> GatewaySession | None:
        """The open session of a secret. Looked up by digest, so that time tells nothing of it."""
        return self._sessions.get(_digest(secret))

    def _forget(self, session: GatewaySession) -> None:
        self._sessions.pop(_digest(session.secret), None)
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
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        await asyncio.gather(*(policy.pool.close() for policy in self._policies.values()))
        await self._renderings.close()


def _add(totals: dict[str, int], counts: dict[str, int]) -> None:
    for name in totals:
        totals[name] += counts["turns" if name == "calls" else name]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
