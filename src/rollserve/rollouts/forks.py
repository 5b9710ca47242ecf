"""The sandboxes of an attempt's agent: its own, and those that it forks from snapshots."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from rollserve.errors import Conflict
from rollserve.records.network import Network
from rollserve.rollouts.holdings import Holdings, WantedSandbox
from rollserve.rollouts.worker_ports import WorkerPorts
from rollserve.sandbox.base import Sandbox


class AgentsSandboxes:
    """All with the task's bounds and network; closed with the attempt."""

    def __init__(self, held: Holdings, ports: WorkerPorts, wanted: WantedSandbox, network: Network) -> None:
        self._held = held
        self._ports = ports
        self._wanted = wanted
        self._network = network
        self._forks = 0

    async def open(self) -> Sandbox:
        return await self._open(self._wanted)

    async def fork(self, snapshot: str) -> Sandbox:
        """Raises ``Conflict`` when there are too many."""
        self._forks += 1
        if self._forks > self._ports.bounds.forks:
            raise Conflict(f"an attempt forks {self._ports.bounds.forks} sandboxes at most")
        spec = msgspec.structs.replace(self._wanted.spec, files={}, prepare=(), snapshot=snapshot)
        return await self._open(replace(self._wanted, spec=spec))

    async def _open(self, wanted: WantedSandbox) -> Sandbox:
        sandbox = await self._held.open_sandbox(wanted)
        if self._network != "none":
            await self._held.open_network(self._ports.open_network, self._network, sandbox)
        return sandbox
