"""What pods look like, with the operator's template under them, and how they are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from lightkube.resources.core_v1 import Pod
from lightkube.resources.networking_v1 import NetworkPolicy

from rollserve.errors import ConfigError
from rollserve.sandbox.base import SandboxLimits
from rollserve.sandbox.kubernetes.pod import PodMarks, manifest, opening_policy, policies, policy
from rollserve.sandbox.kubernetes.settings import DEFAULTS, KubernetesSettings, Opening
from rollserve.sandbox.kubernetes.standing import Standing, standing
from rollserve.sandbox.kubernetes.template import merged, read_template

MARKS = PodMarks(root="r", worker="w", owner="attempt/1", ends_at=1000.0)
LIMITS = SandboxLimits(memory_mb=512, disk_mb=1024, cpus=1.5)


def made(settings: KubernetesSettings = DEFAULTS, **template: Any) -> dict[str, Any]:
    return manifest(
        "rollserve-1", "a/b:v1", LIMITS, marks=MARKS, settings=settings, template=template, ttl_s=100.0
    )


def test_a_pod_has_no_more_than_it_needs() -> None:
    spec = made()["spec"]
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]
    assert [spec[name] for name in ("hostNetwork", "hostPID", "hostIPC")] == [False] * 3
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] == 760
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["resources"] == {
        "limits": {"memory": "512Mi", "ephemeral-storage": "1024Mi", "cpu": "1500m"}
    }


def test_every_name_of_it_is_known_to_kubernetes() -> None:
    settings = KubernetesSettings(
        node_selector={"pool": "sandboxes"},
        tolerations=({"key": "sandbox", "operator": "Exists"},),
        image_pull_secrets=("pull",),
        runtime_class="gvisor",
        run_as_user=1000,
    )
    pod = made(settings)
    assert Pod.from_dict(pod).to_dict() == pod
    assert pod["spec"]["runtimeClassName"] == "gvisor"
    (container,) = pod["spec"]["containers"]
    assert (container["securityContext"]["runAsUser"], container["securityContext"]["runAsNonRoot"]) == (
        1000,
        True,
    )
    assert container["volumeMounts"] == [{"name": "workspace", "mountPath": "/workspace"}]


def test_marks_are_read_back() -> None:
    metadata = made()["metadata"]
    assert PodMarks.read(metadata["labels"], metadata["annotations"]) == MARKS
    assert PodMarks.read({"rollserve/sandbox": "true"}, {}) is None


def test_the_template_lies_under_it(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(
        """
metadata: {labels: {team: a}}
spec:
  hostNetwork: true
  priorityClassName: low
  tolerations: [{key: spot, operator: Exists}]
  containers:
    - {name: side, image: x}
    - name: sandbox
      resources: {requests: {cpu: 100m}}
      securityContext: {privileged: true, readOnlyRootFilesystem: false}
"""
    )
    settings = KubernetesSettings(tolerations=({"key": "own"},))
    pod = made(settings, **read_template(path))
    spec = pod["spec"]
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["rollserve/sandbox"] == "true"
    assert (spec["hostNetwork"], spec["priorityClassName"]) == (False, "low")
    assert [each["key"] for each in spec["tolerations"]] == ["spot", "own"]
    ours, side = spec["containers"]
    assert side == {"name": "side", "image": "x"}
    assert ours["resources"]["requests"] == {"cpu": "100m"}
    assert ours["resources"]["limits"]["memory"] == "512Mi"
    assert ours["securityContext"]["privileged"] is False
    assert ours["securityContext"]["readOnlyRootFilesystem"] is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spec: {nodeSelecter: {a: b}}", "spec.nodeSelecter"),
        ("spec: {containers: [{name: sandbox, imagepull: x}]}", r"containers\[0\].imagepull"),
        ("spec: {tolerations: 3}", "pod.yaml"),
        ("[]", "no pod"),
        ("a: [", "pod.yaml"),
    ],
)
def test_a_template_that_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_template(path)
    assert caught.value.field == "kubernetes.pod_template"


def test_a_template_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_template(tmp_path / "pod.yaml")
    assert read_template(None) == {}


def test_merging_leaves_what_it_is_given_alone() -> None:
    under = {"a": {"b": 1}, "volumes": [1]}
    assert merged(under, {"a": {"c": 2}, "volumes": [2]}) == {"a": {"b": 1, "c": 2}, "volumes": [1, 2]}
    assert under == {"a": {"b": 1}, "volumes": [1]}


def test_the_policy_lets_nothing_in_or_out() -> None:
    spec = policy()["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in spec
    assert "egress" not in spec
    labels = made()["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()


OPENING = Opening("10.0.0.5", 8800, 8803)


def test_one_is_let_out_to_its_sessions_alone() -> None:
    first, second = policies(KubernetesSettings(opening=OPENING))
    assert first == policy()
    spec = second["spec"]
    assert spec["policyTypes"] == ["Egress"]
    assert spec["egress"] == [
        {
            "to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}],
            "ports": [{"protocol": "TCP", "port": 8800, "endPort": 8803}],
        }
    ]
    chosen = spec["podSelector"]["matchLabels"].items()
    assert chosen <= made(KubernetesSettings(opening=OPENING))["metadata"]["labels"].items()
    for others in (None, replace(OPENING, last_port=8804), replace(OPENING, address="fd00::5")):
        labels = made(KubernetesSettings(opening=others))["metadata"]["labels"]
        assert not chosen <= labels.items()


def test_the_policy_of_another_address_is_another() -> None:
    other = opening_policy(replace(OPENING, address="fd00::5"))
    assert other["spec"]["egress"][0]["to"] == [{"ipBlock": {"cidr": "fd00::5/128"}}]
    assert other["metadata"]["name"] != opening_policy(OPENING)["metadata"]["name"]


def test_without_policies_of_ours_there_is_no_opening() -> None:
    assert list(policies(KubernetesSettings(network_policy=False, opening=OPENING))) == []


def test_kubernetes_understands_the_policy() -> None:
    for told in policies(KubernetesSettings(opening=OPENING)):
        assert NetworkPolicy.from_dict(told).to_dict() == told


def container(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "sandbox",
        "image": "",
        "imageID": "",
        "restartCount": 0,
        "ready": False,
        "state": state,
    }


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available",
}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"phase": "Pending"}, Standing(reason="Pending")),
        (
            {"phase": "Pending", "conditions": [UNSCHEDULABLE]},
            Standing(reason="Unschedulable", message="0/3 nodes are available"),
        ),
        (
            {"containerStatuses": [container({"waiting": {"reason": "ErrImagePull"}})]},
            Standing(reason="ErrImagePull"),
        ),
        (
            {"containerStatuses": [container({"waiting": {"reason": "ImagePullBackOff", "message": "m"}})]},
            Standing(failed=True, reason="ImagePullBackOff", message="m"),
        ),
        ({"phase": "Running", "containerStatuses": [container({"running": {}})]}, Standing(ready=True)),
        (
            {
                "phase": "Failed",
                "reason": "Evicted",
                "message": "low on memory",
                "containerStatuses": [container({"terminated": {"exitCode": 137, "reason": "Error"}})],
            },
            Standing(failed=True, reason="Evicted", message="low on memory"),
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [container({"terminated": {"exitCode": 137, "reason": "OOMKilled"}})],
            },
            Standing(failed=True, reason="OOMKilled", message="exit code 137"),
        ),
    ],
)
def test_how_a_pod_stands(status: dict[str, Any], expected: Standing) -> None:
    pod = Pod.from_dict({"metadata": {"name": "p"}, "status": status})
    assert isinstance(pod, Pod)
    assert standing(pod) == expected


def test_a_pod_that_is_being_deleted_is_no_sandbox() -> None:
    pod = Pod.from_dict(
        {
            "metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"},
            "status": {"phase": "Running", "containerStatuses": [container({"running": {}})]},
        }
    )
    assert isinstance(pod, Pod)
    assert standing(pod).failed
