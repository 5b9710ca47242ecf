"""Runtime ``kubernetes``: the conformance suite, against a server that plays the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from rollserve.testing.kubernetes_server import cluster_process
from rollserve.testing.runtime_conformance import RuntimeConformance

pytestmark = [pytest.mark.userns, pytest.mark.slow]


class TestKubernetesRuntime(RuntimeConformance):
    factory = "rollserve.testing.kubernetes_server:make_runtime"
    many = 3

    @pytest.fixture(autouse=True)
    def _cluster(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """In a process of its own: descriptors are counted."""
        with cluster_process(tmp_path) as kubeconfig:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
            yield

    def image_reference(self) -> str:
        return "docker://registry.example.org/team/tool:v1"
