"""What the settings say reaches the runtimes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rollserve.build.runtimes import offered, runtime_options
from rollserve.config import KubernetesSettings, SessionAddressSettings, Settings, WorkerSettings
from rollserve.sandbox.kubernetes.settings import Opening


def test_every_setting_of_kubernetes_reaches_the_runtime() -> None:
    told = {
        "kubeconfig": Path("/etc/kube"),
        "context": "here",
        "namespace": "rollouts",
        "pod_template": Path("/etc/pod.yaml"),
        "node_selector": {"pool": "sandboxes"},
        "tolerations": [{"key": "spot"}],
        "image_pull_secrets": ["pull"],
        "runtime_class": "gvisor",
        "run_as_user": 1000,
        "network_policy": False,
        "isolated": True,
        "starts_at_once": 3,
        "start_s": 7.0,
    }
    assert set(told) == set(KubernetesSettings.model_fields)
    made = runtime_options(Settings(kubernetes=KubernetesSettings.model_validate(told))).kubernetes
    assert made is not None
    expected = {
        **told,
        "tolerations": ({"key": "spot"},),
        "image_pull_secrets": ("pull",),
        "stop_s": 120.0,
        "opening": None,
    }
    assert asdict(made) == expected


def test_pods_are_let_out_to_where_sessions_are_advertised() -> None:
    told = SessionAddressSettings(url="https://10.0.0.5:{port}", ports="8800-8803")
    made = runtime_options(Settings(session_address=told)).kubernetes
    assert made is not None
    assert made.opening == Opening("10.0.0.5", 8800, 8803)


def test_it_is_offered_where_it_is_named() -> None:
    assert "kubernetes" not in offered(Settings())
    assert "kubernetes" in offered(Settings(workers=WorkerSettings(runtimes=["kubernetes"])))
