"""What a sandbox's pod looks like, and the policy that keeps its kind off the network.

A template of the operator's is laid under it (``template``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

from rollserve.sandbox.base import WORKDIR, SandboxLimits
from rollserve.sandbox.kubernetes.settings import KubernetesSettings, Opening
from rollserve.sandbox.kubernetes.template import merged

CONTAINER = "sandbox"
POLICY_NAME = "rollserve-sandboxes"
OPENING_NAME = "rollserve-sessions"
SANDBOX_LABEL = "rollserve/sandbox"
OPENING_LABEL = "rollserve/sessions"
_ROOT, _WORKER, _ENDS, _OWNER = (
    "rollserve/root",
    "rollserve/worker",
    "rollserve/ends-at",
    "rollserve/owner",
)
_DEADLINE_SLACK_S = 60.0
_STOP_GRACE_S = 1
"""None would take the pod off the API's list before its node has ended it."""

_WAIT = "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"
"""Pid 1: it does nothing but bury orphans, and ends when it is told to."""


@dataclass(frozen=True)
class PodMarks:
    """Whose a pod is: the folder of workers (``root``, an id of its own), the worker, the attempt, and when
    (seconds since 1970) its time is over."""

    root: str
    worker: str
    owner: str
    ends_at: float

    def metadata(self, name: str) -> dict[str, Any]:
        labels = {
            SANDBOX_LABEL: "true",
            "app.kubernetes.io/managed-by": "rollserve",
            _ROOT: self.root,
            _WORKER: self.worker,
            _ENDS: f"{self.ends_at:.0f}",
        }
        return {"name": name, "labels": labels, "annotations": {_OWNER: self.owner}}

    @classmethod
    def read(cls, labels: Mapping[str, str], annotations: Mapping[str, str]) -> PodMarks | None:
        """None for a pod that is none of ours, whatever it calls itself."""
        try:
            ends_at = float(labels[_ENDS])
            return cls(labels[_ROOT], labels[_WORKER], annotations.get(_OWNER, ""), ends_at)
        except (KeyError, ValueError):
            return None


def manifest(
    name: str,
    image: str,
    limits: SandboxLimits,
    *,
    marks: PodMarks,
    settings: KubernetesSettings,
    template: Mapping[str, Any],
    ttl_s: float,
) -> dict[str, Any]:
    """``activeDeadlineSeconds`` ends it should nobody else do so; its object then waits for a reaper."""
    spec: dict[str, Any] = {
        "activeDeadlineSeconds": math.ceil(ttl_s + settings.start_s + _DEADLINE_SLACK_S),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostIPC": False,
        "hostNetwork": False,
        "hostPID": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _STOP_GRACE_S,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(image, limits, settings)],
        **_wishes(settings),
    }
    if settings.run_as_user is not None:
        spec["volumes"] = [{"name": "workspace", "emptyDir": {"sizeLimit": f"{limits.disk_mb}Mi"}}]
    metadata = marks.metadata(name)
    if settings.opening is not None:
        metadata["labels"][OPENING_LABEL] = _id_of(settings.opening)
    return merged(template, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def _container(image: str, limits: SandboxLimits, settings: KubernetesSettings) -> dict[str, Any]:
    bounds = {"memory": f"{limits.memory_mb}Mi", "ephemeral-storage": f"{limits.disk_mb}Mi"}
    if limits.cpus is not None:
        bounds["cpu"] = f"{math.ceil(limits.cpus * 1000)}m"
    security: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    made: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": ["/bin/sh", "-c", _WAIT],
        "args": [],
        "resources": {"limits": bounds},
        "securityContext": security,
    }
    if settings.run_as_user is not None:
        security |= {"runAsNonRoot": True, "runAsUser": settings.run_as_user}
        made["volumeMounts"] = [{"name": "workspace", "mountPath": WORKDIR}]
    return made


def _wishes(settings: KubernetesSettings) -> dict[str, Any]:
    wished = {
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(each) for each in settings.tolerations],
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "runtimeClassName": settings.runtime_class,
    }
    return {name: value for name, value in wished.items() if value}


def policies(settings: KubernetesSettings) -> Iterator[dict[str, Any]]:
    """Those that are to be there. Policies only add up: another one that allows something to these pods does
    so."""
    if settings.network_policy:
        yield policy()
        if settings.opening is not None:
            yield opening_policy(settings.opening)


def policy() -> dict[str, Any]:
    """Nothing in, nothing out, for every sandbox of the namespace."""
    spec = {
        "podSelector": {"matchLabels": {SANDBOX_LABEL: "true"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    return _policy(POLICY_NAME, spec)


def opening_policy(opening: Opening) -> dict[str, Any]:
    """Out to where sessions are advertised, for the pods of those who advertise them there. The name says
    where, so that the policy of another address is another one; one that is no longer wanted selects none."""
    port = {"protocol": "TCP", "port": opening.first_port, "endPort": opening.last_port}
    cidr = str(ip_network(opening.address))
    spec = {
        "podSelector": {"matchLabels": {SANDBOX_LABEL: "true", OPENING_LABEL: _id_of(opening)}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"ipBlock": {"cidr": cidr}}], "ports": [port]}],
    }
    return _policy(f"{OPENING_NAME}-{_id_of(opening)}", spec)


def _policy(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "rollserve"}},
        "spec": spec,
    }


def _id_of(opening: Opening) -> str:
    told = f"{opening.address} {opening.first_port} {opening.last_port}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]
