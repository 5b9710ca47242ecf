"""Unmodified programs as agents: in the sandbox, with a way to their session and nowhere else."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from rollserve.errors import FailureKind
from rollserve.records.rollout import RolloutState
from rollserve.records.task import AgentSpec, Limits
from rollserve.sandbox.registry import make_runtime
from rollserve.testing.runtime_probes import processes_with, unique_seconds, wait_until_gone
from tests.integration.conftest import Server, one

HARNESS = """
import json, os, subprocess, sys, urllib.request

URL, KEY, WHAT = sys.argv[1:4]
TOOL = {"type": "function", "function": {"name": "shell", "description": "Run.", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}


def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(f"{URL}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


messages = [{"role": "user", "content": WHAT}]
while True:
    try:
        said = ask(messages)
    except urllib.error.HTTPError as error:
        print("refused:", error.read().decode())
        sys.exit(int(os.environ.get("GIVES_UP_WITH", "1")))
    messages.append(said)
    if not said.get("tool_calls"):
        print("done:", said["content"])
        break
    for call in said["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        told = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        print("ran:", command)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
"""

PROBE = """
import json, socket, sys
found = {}
for name, host, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((host, port), timeout=5).close()
        found[name] = "open"
    except OSError as error:
        found[name] = type(error).__name__
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(
    shutil.which("python3", path="/usr/bin:/bin") is None, reason="sandboxes of this machine have no python3"
)


def program(command: str = "python3 harness.py {base_url} {api_key} {instruction}", **options: Any) -> Any:
    files = {"harness.py": HARNESS, "probe.py": PROBE}
    agent = AgentSpec(name="command", options={"command": command, "files": files, **options})
    return {"agent": agent, "tools": []}


async def test_a_program_in_the_sandbox_is_trained_token_for_token(
    shared_server: Server, backend_url: str
) -> None:
    async with shared_server.client() as client:
        group = await one(client, backend_url, **program())
        (rollout,) = group.rollouts
        assert rollout.rollout.failure is None
        assert rollout.reward == 1.0
        (sample,) = rollout.samples
        attempt = (await client.rollout(rollout.rollout.id)).last_attempt
        assert attempt is not None
        log = [line for _, line in await client.log(attempt.id)]
    assert len(sample.call_ids) == 3
    assert sample.loss_mask.sum() == 120
    assert log.count("ran: cat note; pwd") == 2
    assert any(line.startswith("done: ") for line in log)
    assert attempt.detail["agent"]["exit_code"] == 0
    assert attempt.detail["agent"]["ended"] == "exit code 0"


async def test_there_is_no_other_way_out(shared_server: Server, backend_url: str, runtime: str) -> None:
    if not make_runtime(runtime, shared_server.folder / "look").report().isolated:
        pytest.skip(f"{runtime} isolates nothing, and says so")
    async with shared_server.client() as client:
        (worker,) = (await client.status()).workers
        api_port, gateway_port = (
            int(url.rsplit(":", 1)[1]) for url in (shared_server.url, worker["gateway_url"])
        )
        wanted = [
            ["api", "127.0.0.1", api_port],
            ["api by name", "localhost", api_port],
            ["gateway", "127.0.0.1", gateway_port],
            ["outside", "192.0.2.1", 80],
            ["a name", "example.com", 80],
        ]
        asked = json.dumps(wanted)
        probe = f"python3 probe.py '{asked}' > answer.txt && python3 harness.py {{base_url}} {{api_key}} hi"
        group = await one(client, backend_url, **program(probe, answer_file="answer.txt"))
        (rollout,) = group.rollouts
        assert rollout.rollout.failure is None
        attempt = (await client.rollout(rollout.rollout.id)).last_attempt
        assert attempt is not None
        found = json.loads(attempt.detail["answer"])
    assert set(found) == {name for name, _, _ in wanted}
    assert "open" not in found.values(), found


@pytest.mark.parametrize("code", ["1", "0"])
async def test_a_limit_marks_what_it_did_whatever_its_exit_code(
    shared_server: Server, backend_url: str, code: str
) -> None:
    async with shared_server.client() as client:
        group = await one(
            client, backend_url, limits=Limits(max_turns=2), **program(env={"GIVES_UP_WITH": code})
        )
    (rollout,) = group.rollouts
    assert rollout.rollout.state is RolloutState.COMPLETED, rollout.rollout.failure
    assert rollout.rollout.truncated_by == "max_turns"
    assert rollout.reward == 0.0


async def test_when_its_time_is_up_it_ends_with_all_it_started(
    shared_server: Server, backend_url: str
) -> None:
    mark = unique_seconds()
    command = f"(setsid sh -c '(sleep {mark}; :) &' &); echo begun; sleep {mark}"
    async with shared_server.client() as client:
        group = await one(client, backend_url, limits=Limits(run_s=2), **program(command))
        (rollout,) = group.rollouts
        assert rollout.rollout.truncated_by == "run_s"
        await wait_until_gone(mark)
        assert not processes_with(mark)
        attempt = (await client.rollout(rollout.rollout.id)).last_attempt
        assert attempt is not None
        assert "begun" in [line for _, line in await client.log(attempt.id)]


async def test_a_broken_program_is_the_agents_failure(shared_server: Server, backend_url: str) -> None:
    async with shared_server.client() as client:
        group = await one(client, backend_url, **program("echo no >&2; exit 3"))
    (rollout,) = group.rollouts
    assert rollout.rollout.failure is not None
    assert rollout.rollout.failure.kind is FailureKind.AGENT
    assert "exit code 3: no" in rollout.rollout.failure.message
    assert rollout.reward is None
