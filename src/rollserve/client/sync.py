"""The client without ``await``: every call runs on one background event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from rollserve.client.client import Client
from rollserve.client.delivery import FinishedGroup
from rollserve.client.runs import RunHandle
from rollserve.records.control import GroupRule
from rollserve.records.policy import Backend, Policy
from rollserve.records.task import Task
from rollserve.records.update import UpdateMode, WeightUpdate
from rollserve.wire import CreatePolicy, GroupSummary, OpenRun, RegisterBackend, RunStatus, ServerStatus

T = TypeVar("T")


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollserve-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()


class SyncRun:
    """``RunHandle``, synchronous."""

    def __init__(self, loop: _Loop, handle: RunHandle) -> None:
        self._loop = loop
        self.handle = handle

    @property
    def id(self) -> str:
        return self.handle.id

    def submit(
        self,
        tasks: Sequence[Task],
        *,
        num_rollouts: int,
        rule: GroupRule | None = None,
        key: str | None = None,
    ) -> list[GroupSummary]:
        return self._loop.run(self.handle.submit(tasks, num_rollouts=num_rollouts, rule=rule, key=key))

    def groups(
        self, *, trainer: str = "default", prefetch: int = 4, ttl_s: float = 300.0
    ) -> Iterator[FinishedGroup]:
        """Finished groups as they come, until the run is over; each is acked when the next one is asked
        for."""
        source = self.handle.groups(trainer=trainer, prefetch=prefetch, ttl_s=ttl_s)

        asked: list[asyncio.Task[FinishedGroup | None]] = []

        async def next_or_none() -> FinishedGroup | None:
            return await anext(source, None)

        async def following() -> FinishedGroup | None:
            asked[:] = [asyncio.ensure_future(next_or_none())]
            return await asked[0]

        async def close() -> None:
            """After a Ctrl-C the last question may still be open."""
            for question in asked:
                question.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await source.aclose()

        try:
            while (group := self._loop.run(following())) is not None:
                yield group
        finally:
            self._loop.run(close())

    def status(self) -> RunStatus:
        return self._loop.run(self.handle.status())

    def commit(self, name: str, *, epoch: int, trainer: str = "default", cursor: str | None = None) -> None:
        self._loop.run(self.handle.commit(name, epoch=epoch, trainer=trainer, cursor=cursor))

    def close(self) -> None:
        self._loop.run(self.handle.close())


class SyncClient:
    """``Client``, synchronous; what it does not name is reached by ``call(client.anything(…))``."""

    def __init__(self, url: str = "http://127.0.0.1:8700", api_key: str | None = None) -> None:
        self._loop = _Loop()
        self.client = Client(url, api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._loop.run(self.client.close())
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def create_policy(self, spec: CreatePolicy) -> Policy:
        return self._loop.run(self.client.create_policy(spec))

    def register_backend(self, policy: str, spec: RegisterBackend) -> Backend:
        return self._loop.run(self.client.register_backend(policy, spec))

    def set_version(self, policy: str, version: int, label: str | None = None) -> Policy:
        return self._loop.run(self.client.set_version(policy, version, label))

    def begin_update(
        self, policy: str, mode: UpdateMode = UpdateMode.DRAIN, lease_s: float = 300.0
    ) -> WeightUpdate:
        """Returns once the policy's backends are paused."""
        updates = self.client.updates(policy)
        return self._loop.run(updates.ready(self._loop.run(updates.begin(mode, lease_s)).id))

    def commit_update(
        self,
        update: WeightUpdate,
        version: int,
        *,
        label: str | None = None,
        canary: Sequence[float] | None = None,
        adapter_path: str | None = None,
    ) -> Policy:
        updates = self.client.updates(update.policy)
        return self._loop.run(updates.commit(update.id, version, label, canary, adapter_path))

    def abort_update(self, update: WeightUpdate) -> WeightUpdate:
        return self._loop.run(self.client.updates(update.policy).abort(update.id))

    def open_run(self, spec: OpenRun, *, key: str | None = None) -> SyncRun:
        return SyncRun(self._loop, self._loop.run(self.client.open_run(spec, key=key)))

    def status(self) -> ServerStatus:
        return self._loop.run(self.client.status())
