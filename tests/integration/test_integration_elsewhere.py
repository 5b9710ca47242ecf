"""Programs in sandboxes that are elsewhere: by TLS to their session, and to nothing else there."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollserve.client import Client
from rollserve.errors import FailureKind
from rollserve.records.task import AgentSpec
from rollserve.testing.certificates import Authority
from tests.integration.conftest import Server, one, play
from tests.integration.test_integration_command import program

pytest.importorskip("swerex")
pytest.importorskip("lightkube")

from rollserve.testing.kubernetes_server import cluster_process
from rollserve.testing.swerex_server import ServerDeployment

pytestmark = [
    pytest.mark.userns,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("python3", path="/usr/bin:/bin") is None, reason="machines have no python3"
    ),
]

LOOK = """
import json, sys, urllib.error, urllib.request
found = {}
for path in sys.argv[3:]:
    request = urllib.request.Request(sys.argv[1] + path, headers={"authorization": f"Bearer {sys.argv[2]}"})
    try:
        found[path] = urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        found[path] = error.code
print("found:", json.dumps(found))
"""

CONTROL = ("/v1/status", "/v1/runs", "/v1/policies", "/metrics", "/openapi.json", "/readyz")

Elsewhere = tuple[str, str, list[str]]
"""Runtime, image and settings."""


@pytest.fixture
async def swerex() -> AsyncIterator[Elsewhere]:
    deployment = ServerDeployment()
    await asyncio.to_thread(asyncio.run, deployment.start())
    told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in deployment.told.items())
    yield "remote", "host", [f"remote.deployment={{{told}}}"]
    await deployment.stop()


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Elsewhere]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    with cluster_process(folder) as kubeconfig:
        yield (
            "kubernetes",
            "docker://registry.example.org/team/tool:v1",
            [f"kubernetes.kubeconfig={kubeconfig}"],
        )


@pytest.fixture(params=["swerex", "kubernetes"])
def elsewhere(request: pytest.FixtureRequest) -> Elsewhere:
    found: Elsewhere = request.getfixturevalue(request.param)
    return found


@pytest.fixture
async def advertising(elsewhere: Elsewhere, tmp_path: Path, make_server: Callable[..., Server]) -> Server:
    runtime, _, settings = elsewhere
    authority = Authority(tmp_path)
    signed = authority.sign()
    told = {
        "url": "https://127.0.0.1:{port}",
        "host": "127.0.0.1",
        "ports": "30000-30999",
        "certificate_file": signed.certificate,
        "key_file": signed.key,
        "ca_file": authority.file,
    }
    server = make_server(
        f'workers.runtimes=["{runtime}"]',
        "workers.allow_unsafe_runtime=true",
        *settings,
        *(f"session_address.{name}={value}" for name, value in told.items()),
    )
    await server.start()
    return server


def inside(elsewhere: Elsewhere, command: str) -> dict[str, Any]:
    runtime, image, _ = elsewhere
    made = program(command)
    files = {**made["agent"].options["files"], "look.py": LOOK}
    agent = AgentSpec(name="command", options={**made["agent"].options, "files": files})
    return {**made, "agent": agent, "runtime": runtime, "image": image}


async def test_its_session_is_reached_by_who_trusts_it_and_nothing_else_is(
    advertising: Server, backend_url: str, elsewhere: Elsewhere
) -> None:
    async with advertising.client() as client:
        await _trained_token_for_token(client, backend_url, elsewhere)
        await _trusts_another(client, elsewhere)


async def _trained_token_for_token(client: Client, backend_url: str, elsewhere: Elsewhere) -> None:
    look = f"python3 look.py {{plain_url}} {{api_key}} {' '.join(CONTROL)} /v1/models"
    command = f"echo at {{base_url}}; {look}; python3 harness.py {{base_url}} {{api_key}} {{instruction}}"
    group = await one(client, backend_url, **inside(elsewhere, command))
    (rollout,) = group.rollouts
    assert rollout.rollout.failure is None
    assert rollout.reward == 1.0
    (sample,) = rollout.samples
    assert len(sample.call_ids) == 3
    assert sample.loss_mask.sum() == 120
    attempt = (await client.rollout(rollout.rollout.id)).last_attempt
    assert attempt is not None
    log = [line for _, line in await client.log(attempt.id)]
    assert any(line.startswith("at https://127.0.0.1:30") for line in log)
    (found,) = (json.loads(line.removeprefix("found:")) for line in log if line.startswith("found:"))
    assert found == {**dict.fromkeys(CONTROL, 404), "/v1/models": 200}


async def _trusts_another(client: Client, elsewhere: Elsewhere) -> None:
    command = "SSL_CERT_FILE=/dev/null python3 harness.py {base_url} {api_key} {instruction}"
    group = await play(client, **inside(elsewhere, command))
    (rollout,) = group.rollouts
    assert rollout.rollout.failure is not None
    assert rollout.rollout.failure.kind is FailureKind.AGENT
    assert "CERTIFICATE_VERIFY_FAILED" in rollout.rollout.failure.message
