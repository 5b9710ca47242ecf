"""A policy as this worker knows it: the newest view, its pool of backends, its renderings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Protocol

from rollserve.backend.base import Pool
from rollserve.errors import InfrastructureFailure, InvalidInput
from rollserve.executor.base import PolicyView
from rollserve.gateway.rendering import Rendering
from rollserve.gateway.tokens import TextTokenizer, load_tokenizer
from rollserve.records.policy import Backend, BackendState, Policy, PolicySpec

Thinking = Literal["keep", "strip"]


class PolicyPool(Pool, Protocol):
    """A pool that follows its policy's backends."""

    def update(self, backends: list[Backend]) -> None:
        """These are the policy's backends now."""

    def stats(self) -> dict[str, dict[str, Any]]:
        """By backend id."""

    async def close(self) -> None: ...


PoolFactory = Callable[[Policy], PolicyPool]
"""Makes the (empty) pool of a policy."""


class PolicyState:
    """Follows the views of one policy."""

    def __init__(self, view: PolicyView, make_pool: PoolFactory) -> None:
        self.policy = view.policy()
        self.pool = make_pool(self.policy)
        self._changed = asyncio.Event()
        self._read(view)

    def _read(self, view: PolicyView) -> None:
        self.revision = view.revision
        self.policy = view.policy()
        backends = view.backends()
        self.pool.update(backends)
        active = [backend for backend in backends if backend.state is BackendState.ACTIVE]
        contexts = [self.policy.spec.context_tokens, *(each.info.context_tokens for each in active)]
        self.context_tokens = min((n for n in contexts if n is not None), default=None)
        self.ready = bool(active) and not self.policy.paused

    def update(self, view: PolicyView) -> bool:
        """False for an older view, which is ignored."""
        if view.revision <= self.revision:
            return False
        self._read(view)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return True

    async def wait_ready(self) -> None:
        """Until the policy is not paused and has an active backend. The caller bounds it."""
        while not self.ready:
            await self._changed.wait()


class Renderings:
    """Tokenizers and renderings by policy specification, made once, off the event loop."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, asyncio.Task[TextTokenizer]] = {}
        self._renderings: dict[tuple[str, str, Thinking], asyncio.Task[Rendering]] = {}

    async def get(self, spec: PolicySpec, thinking: Thinking) -> Rendering:
        """Raises ``InfrastructureFailure`` when the tokenizer or renderer can't be had here."""
        key = (spec.tokenizer, spec.renderer.model_dump_json(), thinking)
        task = self._renderings.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._make(spec, thinking))
            self._renderings[key] = task
        try:
            return await asyncio.shield(task)
        except InvalidInput as error:
            raise InfrastructureFailure(str(error), operation="gateway.load_tokenizer") from error

    async def _make(self, spec: PolicySpec, thinking: Thinking) -> Rendering:
        task = self._tokenizers.get(spec.tokenizer)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(asyncio.to_thread(load_tokenizer, spec.tokenizer))
            self._tokenizers[spec.tokenizer] = task
        tokenizer = await asyncio.shield(task)
        return await asyncio.to_thread(Rendering, spec.renderer, tokenizer, thinking)

    async def close(self) -> None:
        tasks = [*self._renderings.values(), *self._tokenizers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
