"""What an attempt holds while it runs, and its releases: each with a deadline, none able to fail it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

from rollserve.agent.base import Toolbox
from rollserve.errors import InfrastructureFailure
from rollserve.gateway.base import Ending, Session
from rollserve.records.network import Network
from rollserve.rollouts.attempt_log import AttemptLog
from rollserve.rollouts.clock import Clock, Deadline
from rollserve.rollouts.failures import boundary
from rollserve.rollouts.worker_ports import (
    AttemptObserver,
    Keeper,
    OpenNetwork,
    ServeSession,
    SessionAddress,
)
from rollserve.sandbox.base import Runtime, Sandbox, SandboxSpec, exports
from rollserve.sandbox.trust import trust

NETWORK_ENV_S = 30.0


@dataclass(frozen=True, kw_only=True)
class WantedSandbox:
    """What is asked of a runtime."""

    runtime: Runtime
    spec: SandboxSpec
    owner: str
    ttl_s: float


class Holdings:
    """Sessions, tools, session socket, networks, sandboxes. What is confirmed released is forgotten; what is
    not stays, and the next call tries it once more. ``errors`` are the releases that failed; while
    ``releasing``, the attempt's task should not be cancelled: half a release may be none."""

    def __init__(self, *, clock: Clock, log: AttemptLog, close_s: float, observer: AttemptObserver) -> None:
        self._clock = clock
        self._log = log
        self._close_s = close_s
        self._observer = observer
        self._sessions: list[Session] = []
        self._tools: AsyncExitStack | None = None
        self._session_socket: AsyncExitStack | None = None
        self._session_url = ""
        self._reaching = asyncio.Lock()
        self._networks = AsyncExitStack()
        self._sandboxes: list[Sandbox] = []
        self._ahead: asyncio.Task[Sandbox | None] | None = None
        self.errors: list[str] = []
        self.releasing = False

    async def open_sandbox(self, wanted: WantedSandbox) -> Sandbox:
        sandbox = await self._create(wanted)
        self._sandboxes.append(sandbox)
        return sandbox

    async def _create(self, wanted: WantedSandbox) -> Sandbox:
        with boundary("sandbox.start", InfrastructureFailure, log=self._log):
            sandbox = await wanted.runtime.create(wanted.spec, owner=wanted.owner, ttl_s=wanted.ttl_s)
        self._observer.count("sandbox_starts")
        return sandbox

    def open_ahead(self, wanted: WantedSandbox, *, within_s: float) -> None:
        """Begin to start a sandbox that ``take_ahead`` will be asked for; it is none of the others yet."""
        self._ahead = asyncio.create_task(self._start_ahead(wanted, within_s), name=f"ahead-{wanted.owner}")

    async def _start_ahead(self, wanted: WantedSandbox, within_s: float) -> Sandbox | None:
        try:
            async with Deadline(self._clock, within_s):
                return await self._create(wanted)
        except Exception as error:  # an edge: whoever needs it starts one of its own, and is told
            self._log(f"no sandbox ahead: {type(error).__name__}: {error}")
            return None

    async def take_ahead(self) -> Sandbox | None:
        """The sandbox that was started ahead, waited for; None when there is none. Cancelled, it is left to
        ``drop_ahead``."""
        if self._ahead is None:
            return None
        sandbox = await asyncio.shield(self._ahead)
        self._ahead = None
        if sandbox is not None:
            self._sandboxes.append(sandbox)
        return sandbox

    async def drop_ahead(self) -> None:
        """Stop what nobody took; what was there already is closed with the others."""
        if self._ahead is None:
            return
        self._ahead.cancel()
        if await self._release("sandbox.ahead", asyncio.wait({self._ahead})):
            ahead, self._ahead = self._ahead, None
            sandbox = None if ahead.cancelled() else ahead.result()
            if sandbox is not None:
                self._sandboxes.append(sandbox)

    async def open_tools(self, opening: AbstractAsyncContextManager[Toolbox]) -> Toolbox:
        self._tools = AsyncExitStack()
        return await self._tools.enter_async_context(opening)

    def hold_session(self, session: Session) -> None:
        self._sessions.append(session)

    async def open_session_socket(self, serve: ServeSession, session: Session, sandbox: Sandbox) -> str:
        """From the sandbox to its session: the base URL there. Opened once, whoever asks meanwhile waits; if
        that fails or is cancelled, the next one tries again."""
        async with self._reaching:
            if self._session_socket is None:
                with boundary("session_socket.open", InfrastructureFailure, log=self._log):
                    sock = await sandbox.listen()
                    way = AsyncExitStack()
                    self._session_url = await way.enter_async_context(serve(session, sock))
                    self._session_socket = way
            return self._session_url

    async def open_session_address(self, address: SessionAddress, session: Session, sandbox: Sandbox) -> str:
        """The same from a sandbox elsewhere, which is told whom to trust there. Nothing of it is held."""
        async with self._reaching:
            if not self._session_url:
                with boundary("session_address.open", InfrastructureFailure, log=self._log):
                    if address.authority:
                        await trust(sandbox, address.authority)
                self._session_url = f"{address.url}/s/{session.id}/v1"
            return self._session_url

    async def open_network(self, opening: OpenNetwork, network: Network, sandbox: Sandbox) -> None:
        """Let the sandbox out as far as ``network`` says; its shell is told how."""
        with boundary("network.open", InfrastructureFailure, log=self._log):
            sock = await sandbox.listen()
            env = await self._networks.enter_async_context(opening(network, sock, log=self._log))
            await sandbox.exec(exports(env), timeout_s=NETWORK_ENV_S)

    async def stop_agent_side(self, ending: Ending) -> None:
        """Tools, then the sessions and the way there: generation has stopped before the sandbox goes.
        ``ending`` is what a session tells an agent that goes on."""
        tools, way = self._tools, self._session_socket
        if tools is not None and await self._release("tools.close", tools.aclose()):
            self._tools = None
        for session in list(self._sessions):
            if await self._release("session.close", session.close(ending)):
                self._sessions.remove(session)
        if way is not None and await self._release("session_socket.close", way.aclose()):
            self._session_socket = None
        await self._release("network.close", self._networks.aclose())

    async def close_sandboxes(self) -> None:
        for sandbox in list(self._sandboxes):
            if await self._release("sandbox.close", sandbox.close()):
                self._sandboxes.remove(sandbox)

    def give_up_sandboxes(self) -> list[Sandbox]:
        """Those that would not close; they are not held any more."""
        left, self._sandboxes = self._sandboxes, []
        return left

    def hand_over(self, keeper: Keeper) -> str | None:
        """Leave the first sandbox, if there is one, to its keeper."""
        if not self._sandboxes:
            return None
        sandbox = self._sandboxes.pop(0)
        keeper.take(sandbox)
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
