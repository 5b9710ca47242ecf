"""The sandboxes of an agent's episode as its hosted code sees them: its own, its forks, their ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from rollserve.errors import Conflict, NotFound
from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.ports import forwarded, forwarded_tcp
from rollserve.usercode import params
from rollserve.usercode.base import Handlers
from rollserve.usercode.serving import decode, handlers_over

MOST_SNAPSHOTS = 64
MOST_FORWARDS = 16


class SandboxHandlers:
    """``fork`` starts a sandbox from a snapshot; whoever it is of closes it. ``ports`` ends the forwards."""

    def __init__(
        self, own: Sandbox, fork: Callable[[str], Awaitable[Sandbox]], ports: AsyncExitStack
    ) -> None:
        self._own = own
        self._fork = fork
        self._ports = ports
        self._forks: dict[str, Sandbox] = {}
        self._snapshots = 0
        self._forwards = 0

    @property
    def handlers(self) -> Handlers:
        return {
            **handlers_over(self._find),
            "sandbox.snapshot": self.snapshot,
            "sandbox.fork": self.fork,
            "sandbox.forward": self.forward,
            "sandbox.close": self.close,
        }

    def _find(self, sandbox_id: str) -> Sandbox:
        if sandbox_id == self._own.id:
            return self._own
        if sandbox_id not in self._forks:
            raise NotFound(f"no sandbox {sandbox_id!r}")
        return self._forks[sandbox_id]

    async def snapshot(self, data: bytes) -> str:
        sandbox = self._find(decode(data, params.OfSandbox).sandbox_id)
        self._snapshots += 1
        if self._snapshots > MOST_SNAPSHOTS:
            raise Conflict(f"an agent takes {MOST_SNAPSHOTS} snapshots at most")
        return await sandbox.snapshot()

    async def fork(self, data: bytes) -> str:
        sandbox = await self._fork(decode(data, params.Fork).snapshot)
        self._forks[sandbox.id] = sandbox
        return sandbox.id

    async def forward(self, data: bytes) -> str:
        order = decode(data, params.ForwardPort)
        sandbox = self._find(order.sandbox_id)
        self._forwards += 1
        if self._forwards > MOST_FORWARDS:
            raise Conflict(f"an agent forwards {MOST_FORWARDS} ports at most")
        if not order.tcp:
            return await self._ports.enter_async_context(forwarded(sandbox, order.port))
        return f"127.0.0.1:{await self._ports.enter_async_context(forwarded_tcp(sandbox, order.port))}"

    async def close(self, data: bytes) -> None:
        sandbox = self._find(decode(data, params.OfSandbox).sandbox_id)
        if sandbox is self._own:
            raise Conflict("the sandbox is the attempt's: it is closed by its owner")
        del self._forks[sandbox.id]
        await sandbox.close()


@asynccontextmanager
async def agents_sandboxes(
    own: Sandbox | None, fork: Callable[[str], Awaitable[Sandbox]]
) -> AsyncIterator[Handlers]:
    """For as long as the agent runs."""
    if own is None:
        yield {}
        return
    async with AsyncExitStack() as ports:
        yield SandboxHandlers(own, fork, ports).handlers
