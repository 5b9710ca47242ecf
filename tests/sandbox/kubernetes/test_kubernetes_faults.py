"""Runtime ``kubernetes`` where the cluster does not do as it is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.base import SandboxSpec
from rollserve.sandbox.kubernetes.runtime import KubernetesRuntime
from rollserve.sandbox.kubernetes.settings import KubernetesSettings, Opening
from rollserve.sandbox.remote.box import RemoteSandbox
from rollserve.testing.kubernetes_server import NAMESPACE, FakeCluster, Fault

pytestmark = pytest.mark.userns
IMAGE = "docker://registry.example.org/team/tool:v1"
SPEC = SandboxSpec(image=IMAGE)


def runtime_of(cluster: FakeCluster, folder: Path, **settings: Any) -> KubernetesRuntime:
    told = KubernetesSettings(kubeconfig=cluster.kubeconfig(folder), **{"start_s": 20.0, **settings})
    return KubernetesRuntime(data_dir=folder, kubernetes=told)


async def create(runtime: KubernetesRuntime) -> RemoteSandbox:
    return await runtime.create(SPEC, owner="a/1", ttl_s=60)


async def refused(runtime: KubernetesRuntime) -> SandboxError:
    with pytest.raises(SandboxError) as caught:
        await create(runtime)
    await runtime.close()
    return caught.value


# -- a pod that does not start -------------------------------------------------------------------------


def waiting(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "not to be had"}}
    container = {
        "name": "sandbox",
        "image": "",
        "imageID": "",
        "restartCount": 0,
        "ready": False,
        "state": state,
    }
    return {"phase": "Pending", "containerStatuses": [container]}


async def test_an_image_that_can_not_be_pulled(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.stuck = waiting("ImagePullBackOff")
    error = await refused(runtime_of(cluster, tmp_path))
    assert "ImagePullBackOff: not to be had" in error.message
    assert "image_pull_secrets" in (error.hint or "")
    assert cluster.pods == {}


async def test_no_node_has_room(cluster: FakeCluster, tmp_path: Path) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    cluster.stuck = {"phase": "Pending", "conditions": [condition]}
    error = await refused(runtime_of(cluster, tmp_path, start_s=1.0))
    assert "not started in time: Unschedulable: 0/3 nodes" in error.message
    assert cluster.pods == {}


# -- an API server that refuses, or is away ------------------------------------------------------------


async def test_forbidden_is_said_with_the_rights_that_are_needed(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.faults["create"] = [Fault(403, "Forbidden", "pods is forbidden")]
    error = await refused(runtime_of(cluster, tmp_path))
    assert "403 Forbidden: pods is forbidden" in error.message
    assert "pods/exec" in (error.hint or "")
    assert cluster.asked.count("create") == 1


async def test_busy_is_waited_for_as_long_as_it_says(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.faults["create"] = [Fault(429, "TooManyRequests", "later", headers={"Retry-After": "1"})] * 2
    runtime = runtime_of(cluster, tmp_path)
    box = await create(runtime)
    assert cluster.asked.count("create") == 3
    assert (await box.exec("echo on")).output == "on\n"
    await runtime.close()


async def test_busy_for_too_long(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.faults["create"] = [Fault(429, "TooManyRequests", "later", headers={"Retry-After": "60"})]
    error = await refused(runtime_of(cluster, tmp_path))
    assert error.retry_after_s == 60.0
    assert "429" in error.message


async def test_a_quota_in_the_way_is_tried_again(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.faults["create"] = [Fault(409, "Conflict", "resourcequotas: the object has been modified")]
    runtime = runtime_of(cluster, tmp_path)
    await create(runtime)
    assert cluster.asked.count("create") == 2
    await runtime.close()


@pytest.mark.parametrize("status", [0, 504])
async def test_an_answer_that_was_lost(cluster: FakeCluster, tmp_path: Path, status: int) -> None:
    """The pod is there already when it is asked for again."""
    cluster.faults["create"] = [Fault(status, "Timeout", "no answer in time", done=True)]
    runtime = runtime_of(cluster, tmp_path)
    box = await create(runtime)
    assert list(cluster.pods) == [box.id]
    await runtime.close()
    assert cluster.pods == {}


async def test_a_conflict_at_the_first_try_is_anothers(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.faults["create"] = [Fault(409, "AlreadyExists", "already exists")]
    assert "AlreadyExists" in (await refused(runtime_of(cluster, tmp_path))).message


async def test_what_stands_before_the_api_server_answers(cluster: FakeCluster, tmp_path: Path) -> None:
    page = {"Content-Type": "text/html"}
    cluster.faults["get"] = [Fault(502, "BadGateway", "<html>", headers=page)] * 2
    runtime = runtime_of(cluster, tmp_path)
    await create(runtime)
    await runtime.close()


async def test_the_api_server_is_away(tmp_path: Path) -> None:
    cluster = FakeCluster()
    cluster.start()
    runtime = runtime_of(cluster, tmp_path, start_s=0.5)
    cluster.close()
    assert "does not answer" in (await refused(runtime)).message
    report = runtime.report()
    assert not report.usable
    assert "does not answer" in report.detail


async def test_a_token_that_is_not_valid(cluster: FakeCluster, tmp_path: Path) -> None:
    runtime = runtime_of(cluster, tmp_path)
    path = tmp_path / "kubeconfig"
    path.write_text(path.read_text().replace("a-token", "another"))
    error = await refused(runtime)
    assert "401" in error.message
    assert "401" in runtime.report().detail


async def test_without_a_way_to_a_cluster(tmp_path: Path) -> None:
    told = KubernetesSettings(kubeconfig=tmp_path / "none")
    runtime = KubernetesRuntime(data_dir=tmp_path, kubernetes=told)
    assert "no way to a cluster" in runtime.report().detail
    assert "no way to a cluster" in (await refused(runtime)).message


# -- calls into a pod ----------------------------------------------------------------------------------


async def test_a_call_that_did_not_begin_is_made_again(cluster: FakeCluster, tmp_path: Path) -> None:
    runtime = runtime_of(cluster, tmp_path)
    box = await create(runtime)
    busy = Fault(429, "TooManyRequests", "later", headers={"Retry-After": "1"})
    cluster.faults["exec"] = [busy, Fault(503, "ServiceUnavailable", "later")]
    assert (await box.exec("echo on")).output == "on\n"
    cluster.faults["exec"] = [Fault(403, "Forbidden", "no pods/exec for you")]
    with pytest.raises(SandboxError, match="403") as caught:
        await box.exec("echo on")
    assert "pods/exec" in (caught.value.hint or "")
    await runtime.close()


async def test_an_evicted_pod_is_called_so(cluster: FakeCluster, tmp_path: Path) -> None:
    runtime = runtime_of(cluster, tmp_path)
    box = await create(runtime)
    cluster.evict(box.id, "The node was low on resource: ephemeral-storage.")
    with pytest.raises(SandboxError, match="Evicted: The node was low on resource") as caught:
        await box.exec("echo on")
    assert "disk_mb" in (caught.value.hint or "")
    await box.close()
    assert cluster.pods == {}
    await runtime.close()


async def test_a_pod_that_vanished(cluster: FakeCluster, tmp_path: Path) -> None:
    runtime = runtime_of(cluster, tmp_path)
    box = await create(runtime)
    running = asyncio.create_task(box.exec("sleep 300"))
    await asyncio.sleep(0.2)
    cluster.do(cluster.pods.pop(box.id).end())
    with pytest.raises(SandboxError, match="NotFound"):
        await running
    await runtime.close()


async def test_an_older_cluster_takes_what_is_short(cluster: FakeCluster, tmp_path: Path) -> None:
    """``v4.channel.k8s.io`` has no way to end what is typed."""
    cluster.protocols = ("v4.channel.k8s.io",)
    runtime = runtime_of(cluster, tmp_path)
    box = await create(runtime)
    assert (await box.exec("echo on; exit 3")).exit_code == 3
    with pytest.raises(SandboxError, match=r"v5\.channel"):
        await box.write_file("f", bytes(100_000))
    await runtime.close()


# -- ends ----------------------------------------------------------------------------------------------


async def test_made_after_it_was_given_up(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.faults["create"] = [Fault(403, "Forbidden", "or so it seems", done=True, after_s=0.3)]
    runtime = runtime_of(cluster, tmp_path)
    with pytest.raises(SandboxError):
        await create(runtime)
    while not cluster.pods:
        await asyncio.sleep(0.01)
    assert await runtime.reap() == 1
    assert cluster.pods == {}
    await runtime.close()


async def test_an_end_that_is_not_confirmed_is_no_end(cluster: FakeCluster, tmp_path: Path) -> None:
    runtime = runtime_of(cluster, tmp_path, stop_s=0.3)
    box = await create(runtime)
    cluster.lingering = True
    with pytest.raises(SandboxError, match="not confirmed"):
        await box.close()
    cluster.lingering = False
    assert await runtime.reap() == 1
    await box.close()
    await runtime.close()


async def test_pods_of_others_are_left_until_their_time_is_over(cluster: FakeCluster, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    mine, other = runtime_of(cluster, here), runtime_of(cluster, there)
    box = await create(mine)
    assert await other.reap() == 0
    assert (await box.exec("echo on")).output == "on\n"
    cluster.pods[box.id].data["metadata"]["labels"]["rollserve/ends-at"] = "1000"
    assert await other.reap() == 1
    await other.close()
    await mine.close()


async def test_a_cancelled_start_leaves_no_pod(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.stuck = waiting("ContainerCreating")
    runtime = runtime_of(cluster, tmp_path)
    starting = asyncio.create_task(create(runtime))
    while not cluster.pods:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert cluster.pods == {}
    await runtime.close()


# -- what is asked of it -------------------------------------------------------------------------------


async def test_a_policy_is_made_once_and_a_pod_carries_its_mark(cluster: FakeCluster, tmp_path: Path) -> None:
    runtime = runtime_of(cluster, tmp_path)
    await create(runtime)
    await create(runtime)
    (made,) = cluster.policies.values()
    for pod in cluster.pods.values():
        metadata = pod.data["metadata"]
        assert made["spec"]["podSelector"]["matchLabels"].items() <= metadata["labels"].items()
        assert metadata["annotations"]["rollserve/owner"] == "a/1"
        assert pod.data["spec"]["containers"][0]["image"] == "registry.example.org/team/tool:v1"
    assert cluster.asked.count("policy") == 2
    await runtime.close()


async def test_pods_are_let_out_to_their_sessions(cluster: FakeCluster, tmp_path: Path) -> None:
    runtime = runtime_of(cluster, tmp_path, opening=Opening("10.0.0.5", 8800, 8803))
    await create(runtime)
    (pod,) = cluster.pods.values()
    closed, opened = cluster.policies.values()
    for made in (closed, opened):
        assert made["spec"]["podSelector"]["matchLabels"].items() <= pod.data["metadata"]["labels"].items()
    assert opened["spec"]["egress"][0]["ports"][0]["endPort"] == 8803
    await runtime.close()


async def test_no_policy_where_it_is_not_wanted(cluster: FakeCluster, tmp_path: Path) -> None:
    runtime = runtime_of(cluster, tmp_path, network_policy=False)
    await create(runtime)
    assert cluster.policies == {}
    await runtime.close()


def test_what_the_report_claims(cluster: FakeCluster, tmp_path: Path) -> None:
    report = runtime_of(cluster, tmp_path).report()
    assert report.usable
    assert not report.isolated
    assert report.enforces == ("memory_mb", "cpus")
    assert f"namespace {NAMESPACE}" in report.detail
    assert "processes can't be bounded" in report.detail
    assert "not tried on a real cluster" in report.detail
    assert runtime_of(cluster, tmp_path, isolated=True).report().isolated


@pytest.mark.parametrize("image", ["host", "/", "name"])
def test_images_are_those_of_a_registry(cluster: FakeCluster, tmp_path: Path, image: str) -> None:
    runtime = runtime_of(cluster, tmp_path)
    runtime.check_image(IMAGE)
    with pytest.raises(InvalidInput, match="neither this machine's files") as caught:
        runtime.check_image(image)
    assert caught.value.field == "image"
    assert "docker://" in (caught.value.hint or "")


async def test_what_it_has_not_is_refused(cluster: FakeCluster, tmp_path: Path) -> None:
    runtime = runtime_of(cluster, tmp_path)
    for spec in (
        SandboxSpec(image=IMAGE, prepare=("true",)),
        SandboxSpec(image=IMAGE, sockets={"/tmp/s": "/tmp/s"}),
    ):
        with pytest.raises(InvalidInput):
            await runtime.create(spec, owner="a/1", ttl_s=60)
    assert cluster.asked == []
