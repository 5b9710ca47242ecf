"""How a pod stands: ready, on its way, or failed, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from rollserve.sandbox.kubernetes.pod import CONTAINER

if TYPE_CHECKING:
    from lightkube.models.core_v1 import ContainerStatus, PodStatus
    from lightkube.resources.core_v1 import Pod

HINTS: Mapping[str, str] = MappingProxyType(
    {
        "ImagePullBackOff": "nodes must reach the registry; kubernetes.image_pull_secrets says as whom",
        "ErrImageNeverPull": "the pod template says imagePullPolicy: Never, and the node lacks the image",
        "InvalidImageName": "docker://HOST/NAME:TAG",
        "CreateContainerConfigError": "look at the pod template: what it refers to is not in the namespace",
        "Unschedulable": "no node has room, or fits kubernetes.node_selector and tolerations",
        "Evicted": "the sandbox wrote more than its disk_mb, or its node ran out of something",
        "OOMKilled": "memory_mb of the task's limits",
        "StartError": "the image needs /bin/sh",
    }
)
"""What to do, by reason."""

_HOPELESS = frozenset(
    {"ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError"}
)
"""Why a container waits that will not start by waiting."""


@dataclass(frozen=True)
class Standing:
    """``reason`` is Kubernetes' word, ``failed`` that there is nothing to wait for any more."""

    ready: bool = False
    failed: bool = False
    reason: str = ""
    message: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.reason, self.message) if part) or "it gives no reason"


def standing(pod: Pod) -> Standing:
    status = pod.status
    if status is None:
        return Standing()
    if pod.metadata is not None and pod.metadata.deletionTimestamp is not None:
        return Standing(failed=True, reason=status.reason or "Deleted", message="it is being deleted")
    container = next((each for each in status.containerStatuses or () if each.name == CONTAINER), None)
    if status.phase in ("Failed", "Succeeded"):
        return _ended(status, container)
    state = container.state if container is not None else None
    if state is not None and state.terminated is not None:
        return _ended(status, container)
    if state is not None and state.running is not None:
        return Standing(ready=True)
    if state is not None and state.waiting is not None and state.waiting.reason:
        reason = state.waiting.reason
        return Standing(failed=reason in _HOPELESS, reason=reason, message=state.waiting.message or "")
    return _unscheduled(status)


def _ended(status: PodStatus, container: ContainerStatus | None) -> Standing:
    """The pod's own reason (``Evicted``, ``DeadlineExceeded``) says more than its container's."""
    state = container.state if container is not None else None
    ended = state.terminated if state is not None else None
    if status.reason or ended is None:
        return Standing(failed=True, reason=status.reason or "Failed", message=status.message or "")
    message = ended.message or f"exit code {ended.exitCode}"
    return Standing(failed=True, reason=ended.reason or "Failed", message=message)


def _unscheduled(status: PodStatus) -> Standing:
    """Waited for: a cluster may get another node, or a sandbox end."""
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return Standing(reason=condition.reason or "", message=condition.message or "")
    return Standing(reason="Pending")
