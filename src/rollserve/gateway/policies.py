"""A policy as this worker knows it: the newest view, its pool of backends, its renderings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from rollserve.backend.base import Pool
from rollserve.cancelling import failed
from rollserve.errors import InfrastructureFailure, InvalidInput
from rollserve.executor.base import PolicyView
from rollserve.gateway.rendering import Rendering
from rollserve.gateway.tokens import TextTokenizer, load_tokenizer
from rollserve.records.policy import Backend, BackendState, Policy, PolicySpec, takes_images
from rollserve.records.update import UpdateMode, WeightUpdate

Thinking = Literal["keep", "strip"]


class PolicyPool(Pool, Protocol):
    """A pool that follows its policy's backends."""

    def update(self, backends: list[Backend]) -> None:
        """These are the policy's backends now."""

    def hold(self, update: WeightUpdate | None) -> None:
        """Send nothing while the update is open; None: go on."""

    def stats(self) -> dict[str, dict[str, Any]]:
        """By backend id."""

    async def close(self) -> None: ...


PoolFactory = Callable[[Policy], PolicyPool]
"""Makes the (empty) pool of a policy."""


class PolicyState:
    """Follows the views of one policy. ``sees``: it takes images."""

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
        self.pool.hold(self.updating)
        active = [backend for backend in backends if backend.state is BackendState.ACTIVE]
        contexts = [self.policy.spec.context_tokens, *(each.info.context_tokens for each in active)]
        self.context_tokens = min((n for n in contexts if n is not None), default=None)
        self.sees = takes_images(self.policy.spec, backends)
        self.structured = bool(active) and all(each.info.structured for each in active)
        self.ready = bool(active) and not self.policy.paused and self.updating is None

    def update(self, view: PolicyView) -> bool:
        """False for an older view, which is ignored."""
        if view.revision <= self.revision:
            return False
        self._read(view)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return True

    @property
    def updating(self) -> WeightUpdate | None:
        """The update of the weights that is open."""
        update = self.policy.update
        return update if update is not None and update.open else None

    @property
    def frozen(self) -> bool:
        """Whether generations stand still in the engines: what one was sampled under is known afterwards."""
        return self.updating is not None and self.updating.mode is UpdateMode.KEEP

    async def wait_ready(self) -> None:
        """Until the policy is not paused or updated and has an active backend. The caller bounds it."""
        while not self.ready:
            await self._changed.wait()

    async def wait_thawed(self) -> None:
        while self.frozen:
            await self._changed.wait()


T = TypeVar("T")


async def _loaded(task: asyncio.Task[T]) -> T:
    try:
        return await asyncio.shield(task)
    except InvalidInput as error:
        raise InfrastructureFailure(str(error), operation="gateway.load_tokenizer") from error


class Renderings:
    """Tokenizers and renderings by policy specification, made once, off the event loop."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, asyncio.Task[TextTokenizer]] = {}
        self._renderings: dict[tuple[str, str, Thinking], asyncio.Task[Rendering]] = {}

    async def get(self, spec: PolicySpec, thinking: Thinking) -> Rendering:
        """Raises ``InfrastructureFailure`` when the tokenizer or renderer can't be had here."""
        key = (spec.tokenizer or "", spec.renderer.model_dump_json(), thinking)
        task = self._renderings.get(key)
        if task is None or failed(task):
            task = asyncio.create_task(self._make(spec, thinking))
            self._renderings[key] = task
        return await _loaded(task)

    async def tokenizer(self, spec: PolicySpec) -> TextTokenizer:
        """Alone, for engines that render. Raises ``InfrastructureFailure``."""
        return await _loaded(self._load(spec))

    async def _make(self, spec: PolicySpec, thinking: Thinking) -> Rendering:
        tokenizer = await asyncio.shield(self._load(spec))
        return await asyncio.to_thread(Rendering, spec.renderer, tokenizer, thinking)

    def _load(self, spec: PolicySpec) -> asyncio.Task[TextTokenizer]:
        name = spec.tokenizer
        if name is None:
            message = f"policy {spec.name!r} has no tokenizer"
            raise InfrastructureFailure(message, operation="gateway.load_tokenizer")
        task = self._tokenizers.get(name)
        if task is None or failed(task):
            task = asyncio.create_task(asyncio.to_thread(load_tokenizer, name))
            self._tokenizers[name] = task
        return task

    async def close(self) -> None:
        tasks = [*self._renderings.values(), *self._tokenizers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
