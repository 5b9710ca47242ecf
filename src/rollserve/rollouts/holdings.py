"""What an attempt holds while it runs, and its releases: each with a deadline, none able to fail it."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from rollserve.agent.base import Toolbox
from rollserve.errors import InfrastructureFailure
from rollserve.gateway.base import Session
from rollserve.rollouts.attempt_log import AttemptLog
from rollserve.rollouts.clock import Clock, Deadline
from rollserve.rollouts.failures import boundary
from rollserve.rollouts.worker_ports import AttemptObserver
from rollserve.sandbox.base import Runtime, Sandbox, SandboxSpec


class Holdings:
    """Session, tools and sandboxes. What is confirmed released is forgotten; what is not stays, and
    the next call tries it once more. ``errors`` are the releases that failed; while ``releasing``, the
    attempt's task should not be cancelled: half a release may be none."""

    def __init__(self, *, clock: Clock, log: AttemptLog, close_s: float, observer: AttemptObserver) -> None:
        self._clock = clock
        self._log = log
        self._close_s = close_s
        self._observer = observer
        self._session: Session | None = None
        self._tools: AsyncExitStack | None = None
        self._sandboxes: list[Sandbox] = []
        self.errors: list[str] = []
        self.releasing = False

    async def open_sandbox(self, runtime: Runtime, spec: SandboxSpec, *, owner: str, ttl_s: float) -> Sandbox:
        with boundary("sandbox.start", InfrastructureFailure, log=self._log):
            sandbox = await runtime.create(spec, owner=owner, ttl_s=ttl_s)
        self._sandboxes.append(sandbox)
        self._observer.count("sandbox_starts")
        return sandbox

    async def open_tools(self, opening: AbstractAsyncContextManager[Toolbox]) -> Toolbox:
        self._tools = AsyncExitStack()
        return await self._tools.enter_async_context(opening)

    def hold_session(self, session: Session) -> None:
        self._session = session

    async def stop_agent_side(self) -> None:
        """Tools, then the session: generation has stopped before the sandbox goes."""
        tools, session = self._tools, self._session
        if tools is not None and await self._release("tools.close", tools.aclose()):
            self._tools = None
        if session is not None and await self._release("session.close", session.close()):
            self._session = None

    async def close_sandboxes(self) -> None:
        for sandbox in list(self._sandboxes):
            if await self._release("sandbox.close", sandbox.close()):
                self._sandboxes.remove(sandbox)

    def keep_sandbox(self, seconds: float) -> str | None:
        """Leave the first sandbox open for somebody to look at; the observer closes it."""
        if not self._sandboxes:
            return None
        sandbox = self._sandboxes.pop(0)
        self._observer.keep(sandbox, seconds)
        return sandbox.id

    def note(self, trouble: str) -> None:
        self.errors.append(trouble[:500])
        self._observer.count("release_errors")
        self._log(f"release failed: {trouble}")

    async def _release(self, what: str, closing: Awaitable[object]) -> bool:
        """True when it is confirmed."""
        self.releasing = True
        try:
            async with Deadline(self._clock, self._close_s):
                await closing
        except Exception as error:  # an edge: whatever a release raises is recorded, and no more
            self.note(f"{what}: {type(error).__name__}: {error}")
            return False
        finally:
            self.releasing = False
        return True
