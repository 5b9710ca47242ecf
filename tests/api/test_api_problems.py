"""Bad input meets a precise error, before anything starts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from rollserve.api import bodies
from rollserve.api.problems import LingeringResponse
from rollserve.testing.server_room import Room

POLICY = {"name": "pol", "model": "m", "tokenizer": "tiny"}
TASK: dict[str, Any] = {"instruction": "act", "grader": {"name": "exact"}}


@pytest.fixture
async def run_id(api: httpx.AsyncClient) -> str:
    await api.post("/v1/policies", json=POLICY)
    return str((await api.post("/v1/runs", json={"policy": "pol"})).json()["id"])


def problem(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = answer.json()
    assert found["status"] == answer.status_code
    assert set(found) == {"type", "title", "status", "code", "detail", "field", "hint"}
    return found


BAD_TASKS: list[tuple[dict[str, Any], str, str]] = [
    ({"agent": {"name": "tol"}}, "groups.0.task.agent.name", "'tool'"),
    ({"grader": {"name": "exacct"}}, "groups.0.task.grader.name", "'exact'"),
    ({"grader": {"nme": "exact"}}, "groups.0.task.grader.nme", "'name'"),
    ({"instructions": "x"}, "groups.0.task.instructions", "'instruction'"),
    ({"image": "nowhere"}, "groups.0.task.image", "no such image"),
    ({"limits": {"run_s": -1}}, "groups.0.task.limits.run_s", "greater than 0"),
    ({"limits": {"max_turn": 3}}, "groups.0.task.limits.max_turn", "'max_turns'"),
    ({"limits": {"wall_s": 1e12}}, "groups.0.task.limits.wall_s", "less than"),
    ({"instruction": ""}, "groups.0.task.instruction", "at least 1"),
    ({"instruction": 5}, "groups.0.task.instruction", "string"),
    ({"tools": "shell"}, "groups.0.task.tools", "array"),
]


async def test_a_bad_task(api: httpx.AsyncClient, run_id: str) -> None:
    for changes, field, says in BAD_TASKS:
        body = {"groups": [{"task": {**TASK, **changes}}]}
        for where in (f"/v1/runs/{run_id}/groups", "/v1/check"):
            found = problem(await api.post(where, json=body))
            assert (found["status"], found["field"]) == (400, field)
            assert says in f"{found['detail']} {found['hint']}"
    assert (await api.get(f"/v1/runs/{run_id}/groups")).json()["items"] == []


async def test_a_group_of_the_wrong_size(api: httpx.AsyncClient, run_id: str) -> None:
    for num_rollouts in (0, -1, 100_000, 1.5, "8x", None):
        body = {"groups": [{"task": TASK}, {"task": TASK, "num_rollouts": num_rollouts}]}
        found = problem(await api.post(f"/v1/runs/{run_id}/groups", json=body))
        assert (found["status"], found["field"]) == (400, "groups.1.num_rollouts")


BROKEN_BODIES = [
    (b'{"groups": [}', "line 1 column 13"),
    (b'{"groups": [{"task": 1', "line 1 column"),
    (b"[" * 5000 + b"]" * 5000, "nested too deep"),
    (b"\xff\xfe{}", "line 1 column 1"),
    (b'{"groups": ["\\ud800"]}', "line 1 column"),
    (b"", "a JSON body is needed"),
    (b"null", "object"),
    (b'{"groups": []}', "at least 1"),
]


async def test_a_broken_body(api: httpx.AsyncClient, run_id: str) -> None:
    for body, says in BROKEN_BODIES:
        found = problem(await api.post(f"/v1/runs/{run_id}/groups", content=body))
        assert (found["status"], found["code"]) == (400, "invalid_input")
        assert says in found["detail"]


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"num_rollouts": 0}, "groups.60.num_rollouts", "greater than"),
        ({"taks": 1}, "groups.60.taks", "'task'"),
        ({"task": {**TASK, "limits": {"rn_s": 1}}}, "groups.60.task.limits.rn_s", "'run_s'"),
    ],
)
async def test_a_large_body_is_read_group_by_group_and_as_precise(
    api: httpx.AsyncClient, run_id: str, change: dict[str, Any], field: str, says: str
) -> None:
    groups = [{"task": {**TASK, "instruction": "x" * 1000}} for _ in range(80)]
    where = f"/v1/runs/{run_id}/groups"
    body = msgspec.json.encode({"groups": groups})
    assert len(body) > bodies.LARGE_BYTES
    assert len((await api.post(where, content=body)).json()["groups"]) == 80
    unknown = problem(await api.post(where, json={"groups": groups, "key": 1}))
    assert unknown["field"] == "key"
    groups[60] = {**groups[60], **change}
    found = problem(await api.post(where, json={"groups": groups}))
    assert found["field"] == field
    assert says in f"{found['detail']} {found['hint']}"
    cut = problem(await api.post(where, content=body[:-3]))
    assert cut["detail"].startswith("Invalid JSON")
    bad = body.replace(b'"instruction"', b'"instruction', 1)
    assert "byte" in problem(await api.post(where, content=bad))["detail"]
    deep = body[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert problem(await api.post(where, content=deep))["status"] == 400


async def test_nothing_nested_deeper_than_32_is_kept(api: httpx.AsyncClient, run_id: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"a": deep}
    body = {"groups": [{"task": {**TASK, "metadata": deep}}]}
    found = problem(await api.post(f"/v1/runs/{run_id}/groups", json=body))
    assert (found["field"], found["detail"]) == ("groups.0.task.metadata", "nested deeper than 32")


async def test_what_json_can_not_hold_is_refused(api: httpx.AsyncClient, run_id: str) -> None:
    for value in (b"NaN", b"[1, -Infinity]", b"1e999"):
        body = json.dumps({"groups": [{"task": {**TASK, "metadata": {"a": "@"}}}]}).encode()
        answer = await api.post(f"/v1/runs/{run_id}/groups", content=body.replace(b'"@"', value))
        assert problem(answer)["field"] == "groups.0.task.metadata"


async def test_a_body_over_the_limit(
    api: httpx.AsyncClient, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LingeringResponse, "LINGER_BYTES", 4 << 20)
    declared = await api.post(f"/v1/runs/{run_id}/groups", content=b" " * ((1 << 20) + 1))
    assert problem(declared)["code"] == "too_large"

    pulled = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal pulled
        while True:
            pulled += 1
            assert pulled < 200
            yield b" " * 65536

    chunked = await api.post(f"/v1/runs/{run_id}/groups", content=endless())
    assert problem(chunked)["status"] == 413
    assert pulled < 100


async def test_a_body_over_the_limit_behind_a_socket(served: httpx.AsyncClient) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b" " * 65536

    for body in (b" " * (3 << 20), chunks(48), b" " * (32 << 20)):
        answer = await served.post("/v1/check", content=body)
        assert problem(answer)["code"] == "too_large"
    assert (await served.get("/healthz")).status_code == 200


BAD_VALUES: list[tuple[str, str, Any, str, str]] = [
        ("POST", "/v1/policies", {**POLICY, "name": "a b"}, "name", "pattern"),
        ("POST", "/v1/policies", {**POLICY, "modle": "x"}, "modle", "'model'"),
        ("POST", "/v1/policies", {**POLICY, "name": "new", "tokenizer": "/no/such"}, "tokenizer", "no such"),
        ("POST", "/v1/policies", {**POLICY, "context_tokens": 3}, "context_tokens", "16"),
        ("POST", "/v1/runs", {"policy": "poll"}, "policy", "'pol'"),
        ("POST", "/v1/runs", {"policy": "pol", "thinking": "kep"}, "thinking", "'keep'"),
        ("POST", "/v1/runs", {"policy": "pol", "sampling": {"temp": 1}}, "sampling.temp", "'temperature'"),
        ("POST", "/v1/runs", {"policy": "pol", "failure_rewards": {"grader": 0}}, "failure_rewards.grader",
         "'agent'"),
        ("POST", "/v1/policies/pol/backends", {"url": "http://b", "kind": "vlm"}, "kind", "'vllm'"),
        ("POST", "/v1/policies/pol/backends", {"url": "http://b/other"}, "url", "'another-model'"),
        ("POST", "/v1/policies/pol/backends", {"url": "http://b/nothing"}, "url", "nginx"),
        ("POST", "/v1/policies/pol/version", {"version": -1}, "version", "greater"),
        ("GET", "/v1/rollouts?limit=0", None, "limit", "greater"),
        ("GET", "/v1/rollouts?limit=1001", None, "limit", "less"),
        ("GET", "/v1/rollouts?state=done", None, "state", "queued"),
        ("GET", "/v1/rollouts?runid=x", None, "runid", "'run_id'"),
        ("GET", "/v1/rollouts?cursor=x", None, "cursor", ""),
        ("GET", "/v1/policies?cursor=x", None, "cursor", ""),
        ("GET", "/v1/events?after=-1", None, "after", "greater"),
        ("GET", f"/v1/events?after={10**30}", None, "after", "less"),
        ("POST", "/v1/policies/pol/version", {"version": 2**31}, "version", "less"),
        ("POST", "/v1/policies", {**POLICY, "renderer": {"name": "qwen33"}}, "renderer.name", "'qwen3'"),
        ("POST", "/v1/runs", {"policy": "pol", "sampling": {"seed": 2**64}}, "sampling.seed", "less"),
        ("POST", "/v1/runs", {"policy": "pol", "routes": {"j": "poll"}}, "routes.j.policy", "'pol'"),
        ("POST", "/v1/policies", {**POLICY, "renderer": {"options": {"enable_thinkin": False}}},
         "renderer.options.enable_thinkin", "'enable_thinking'"),
    ]  # fmt: skip


async def test_bad_values(api: httpx.AsyncClient, run_id: str) -> None:
    assert run_id
    for method, path, body, field, says in BAD_VALUES:
        found = problem(await api.request(method, path, json=body))
        assert (found["status"], found["field"]) == (400, field)
        assert says in f"{found['detail']} {found['hint']}"


NOT_THERE = [
    ("GET", "/v1/nope", 404, "not_found"),
    ("PUT", "/v1/runs", 405, "method_not_allowed"),
    ("GET", "/v1/runs/run_none", 404, "not_found"),
    ("POST", "/v1/runs/run_none/close", 404, "not_found"),
    ("GET", "/v1/groups/g", 404, "not_found"),
    ("POST", "/v1/groups/g/cancel", 404, "not_found"),
    ("GET", "/v1/rollouts/r", 404, "not_found"),
    ("GET", "/v1/rollouts/r/trajectory", 404, "not_found"),
    ("POST", "/v1/rollouts/r/cancel", 404, "not_found"),
    ("GET", "/v1/attempts/a/log", 404, "not_found"),
    ("GET", "/v1/policies/p", 404, "not_found"),
    ("POST", "/v1/policies/p/pause", 404, "not_found"),
    ("GET", "/v1/policies/p/backends", 404, "not_found"),
    ("POST", "/v1/deliveries/lea_none/ack", 409, "lease_lost"),
    ("POST", "/v1/deliveries/lea_none/renew", 409, "lease_lost"),
    ("POST", "/v1/runs/run_none/deliveries", 404, "not_found"),
    ("GET", "/v1/runs/run_none/trainers/t/checkpoints", 404, "not_found"),
]


NEAR = [
    ("GET", "/v1/policies/poll", "policy", "did you mean 'pol'?"),
    ("POST", "/v1/policies/poll/backends", "policy", "did you mean 'pol'?"),
    ("GET", "/v1/policies/pol/backends/be_none", "backend_id", "known: none"),
    ("GET", "/v1/runs/first", "run_id", "did you mean '{run_id}', the run named 'first'?"),
    ("GET", "/v1/runs/{run_id}0", "run_id", "did you mean '{run_id}'?"),
    ("GET", "/v1/groups/{run_id}", "group_id", "that is the id of a run"),
    ("POST", "/v1/groups/{run_id}/cancel", "group_id", "that is the id of a run"),
    ("GET", "/v1/regrades/{run_id}", "regrade_id", "that is the id of a run"),
    ("GET", "/v1/runs/second/drift", "run_id", "`rollserve status` lists them"),
    ("GET", "/v1/rollouts?run_id=first", "run_id", "the run named 'first'"),
    ("GET", "/v1/events?run_id=first", "run_id", "the run named 'first'"),
    ("GET", "/v1/polices/pol", None, "did you mean '/v1/policies/pol'?"),
]


async def test_what_is_not_there_is_told_with_what_was_meant(api: httpx.AsyncClient, run_id: str) -> None:
    assert run_id
    opened = (await api.post("/v1/runs", json={"policy": "pol", "name": "first"})).json()["id"]
    for method, path, field, hint in NEAR:
        body = {"url": "http://b"} if method == "POST" else None
        found = problem(await api.request(method, path.format(run_id=opened), json=body))
        assert (path, found["status"], found["field"]) == (path, 404, field)
        assert hint.format(run_id=opened) in found["hint"]


async def test_what_is_not_there(api: httpx.AsyncClient) -> None:
    for method, path, status, code in NOT_THERE:
        found = problem(await api.request(method, path))
        assert (method, path, found["status"], found["code"]) == (method, path, status, code)


async def test_a_version_that_goes_back(api: httpx.AsyncClient, run_id: str) -> None:
    await api.post("/v1/policies/pol/version", json={"version": 2})
    answer = await api.post("/v1/policies/pol/version", json={"version": 1})
    assert (answer.status_code, problem(answer)["code"]) == (409, "version_regression")


async def test_a_full_run_answers_429_with_retry_after(api: httpx.AsyncClient, room: Room) -> None:
    room.executor.play = None
    await api.post("/v1/policies", json=POLICY)
    spec = {"policy": "pol", "quota": {"max_queued_groups": 1}}
    run = (await api.post("/v1/runs", json=spec)).json()["id"]
    body = {"groups": [{"task": TASK}]}
    assert (await api.post(f"/v1/runs/{run}/groups", json=body)).status_code == 201
    answer = await api.post(f"/v1/runs/{run}/groups", json=body)
    assert (answer.status_code, problem(answer)["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_key_used_for_another_body(api: httpx.AsyncClient, run_id: str) -> None:
    where, headers = f"/v1/runs/{run_id}/groups", {"Idempotency-Key": "k"}
    await api.post(where, json={"groups": [{"task": TASK}]}, headers=headers)
    answer = await api.post(where, json={"groups": [{"task": TASK, "num_rollouts": 2}]}, headers=headers)
    assert (answer.status_code, problem(answer)["field"]) == (409, "groups.0")
    for count in (0, 1, 3, 2):  # the key stands for all groups of its request, no fewer and no more
        answer = await api.post(
            where, json={"groups": [{"task": TASK}] * (count or 2)}, headers={"Idempotency-Key": "m"}
        )
        assert answer.status_code == (409 if count in (1, 3) else 201)
    long = await api.post(where, json={"groups": [{"task": TASK}]}, headers={"Idempotency-Key": "k" * 300})
    assert problem(long)["field"] == "Idempotency-Key"


async def test_an_answer_nobody_can_read(api: httpx.AsyncClient, run_id: str) -> None:
    answer = await api.post(f"/v1/runs/{run_id}/deliveries", json={}, headers={"Accept": "text/csv"})
    assert problem(answer)["field"] == "Accept"


async def test_a_bug_is_told_without_its_inside(
    api: httpx.AsyncClient, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(**_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(room.core.policies, "page", broken)
    answer = await api.get("/v1/policies")
    assert (answer.status_code, problem(answer)["code"]) == (500, "internal")
    assert "secret" not in answer.text
