"""How the runtime ``kubernetes`` is told of its cluster; needs no extra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Opening:
    """Ports (the last one too) of an address that pods may connect to."""

    address: str
    first_port: int
    last_port: int


@dataclass(frozen=True)
class KubernetesSettings:
    """Where: ``kubeconfig`` and ``context`` (else the pod's own service account, ``$KUBECONFIG``,
    ``~/.kube/config``), and ``namespace`` (else the context's). What pods are like: ``pod_template`` is a
    file with a pod (YAML: ``metadata``, ``spec``) that ours is laid over; the rest are its fields. With
    ``network_policy`` one is made that lets nothing in or out, and another that lets out to the ``opening``.
    ``isolated`` says that whoever runs this vouches that the cluster's network plugin enforces it.
    ``start_s`` bounds the start of one pod, pulling included, ``stop_s`` the wait for its end."""

    kubeconfig: Path | None = None
    context: str = ""
    namespace: str = ""
    pod_template: Path | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    runtime_class: str = ""
    run_as_user: int | None = None
    network_policy: bool = True
    opening: Opening | None = None
    isolated: bool = False
    starts_at_once: int = 8
    start_s: float = 600.0
    stop_s: float = 120.0


DEFAULTS = KubernetesSettings()
