"""The sandbox that a task wants, for its run or for its grading."""

from __future__ import annotations

from rollserve.errors import UnknownName
from rollserve.records.task import Task
from rollserve.rollouts.holdings import WantedSandbox
from rollserve.rollouts.worker_ports import WorkerPorts
from rollserve.sandbox.base import SandboxLimits, SandboxSpec


def wanted_sandbox(
    task: Task, ports: WorkerPorts, *, owner: str, ttl_s: float, mounts: dict[str, str] | None = None
) -> WantedSandbox:
    """Raises ``UnknownName`` for a runtime that this worker does not have."""
    name = task.runtime or ports.default_runtime
    if name not in ports.runtimes:
        raise UnknownName("runtime", name, ports.runtimes, field="task.runtime")
    limits = SandboxLimits(
        memory_mb=task.limits.memory_mb,
        processes=task.limits.processes,
        file_mb=task.limits.file_mb,
        disk_mb=task.limits.disk_mb,
        cpus=task.limits.cpus,
    )
    return WantedSandbox(
        runtime=ports.runtimes[name],
        spec=SandboxSpec(
            image=task.image,
            prepare=tuple(task.prepare),
            files={path: text.encode() for path, text in task.files.items()},
            env=dict(task.env),
            limits=limits,
            mounts=mounts or {},
        ),
        owner=owner,
        ttl_s=ttl_s,
    )
