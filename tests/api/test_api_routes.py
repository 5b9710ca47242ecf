"""Each route, over the real coordinator and store."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from rollserve.records.rollout import RolloutState
from rollserve.rollouts import policies
from rollserve.testing.fakes_server import a_call, ended, fails
from rollserve.testing.server_room import Room
from rollserve.testing.store_facts import LOST
from rollserve.wire import Delivery, RecordedCalls, WireSample, from_wire

POLICY = {"name": "pol", "model": "m", "tokenizer": "tiny"}
GROUP: dict[str, Any] = {"task": {"instruction": "act", "grader": {"name": "exact"}}, "num_rollouts": 2}


async def open_run(api: httpx.AsyncClient, **settings: Any) -> str:
    assert (await api.post("/v1/policies", json=POLICY)).status_code == 201
    answer = await api.post("/v1/runs", json={"policy": "pol", **settings})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def submit(api: httpx.AsyncClient, run_id: str, groups: int = 1, key: str | None = None) -> list[str]:
    headers = {"Idempotency-Key": key} if key else {}
    answer = await api.post(f"/v1/runs/{run_id}/groups", json={"groups": [GROUP] * groups}, headers=headers)
    assert answer.status_code == 201, answer.text
    return [group["id"] for group in answer.json()["groups"]]


async def finished(api: httpx.AsyncClient, room: Room, run_id: str, groups: int) -> None:
    async def met() -> bool:
        counts = (await api.get(f"/v1/runs/{run_id}")).json()["counts"]
        return bool(counts["groups_finished"] == groups)

    await room.until(met)


async def test_policies_and_backends(api: httpx.AsyncClient) -> None:
    for _ in range(2):
        assert (await api.post("/v1/policies", json=POLICY)).json()["version"] == 0
    assert (await api.post("/v1/policies", json={**POLICY, "model": "x"})).status_code == 409
    assert (await api.get("/v1/policies")).json()["items"][0]["spec"]["name"] == "pol"
    changed = await api.post("/v1/policies/pol/version", json={"version": 3, "label": "w3"})
    assert changed.json()["labels"] == {"w3": 3}
    assert (await api.post("/v1/policies/pol/pause")).json()["paused"] is True
    assert (await api.post("/v1/policies/pol/resume")).json()["paused"] is False
    body = {"url": "http://b:1", "api_key": "sesame"}
    made = await api.post("/v1/policies/pol/backends", json=body)
    assert made.status_code == 201
    assert "sesame" not in made.text
    where = f"/v1/policies/pol/backends/{made.json()['id']}"
    assert (await api.get(where)).json()["info"]["models"] == ["m"]
    assert (await api.get(f"{where}/health")).json()["ok"] is True
    assert (await api.post(f"{where}/drain")).json()["state"] == "draining"
    assert (await api.delete(where)).status_code == 204
    assert (await api.get("/v1/policies/pol/backends")).json() == {"items": [], "next": None}
    assert (await api.get(where)).status_code == 404


async def test_runs(api: httpx.AsyncClient) -> None:
    run_id = await open_run(api, name="a")
    assert (await api.get(f"/v1/runs/{run_id}")).json()["run"]["spec"]["name"] == "a"
    for state, verb in (("paused", "pause"), ("open", "resume")):
        assert (await api.post(f"/v1/runs/{run_id}/{verb}")).json()["state"] == state
    assert (await api.delete(f"/v1/runs/{run_id}")).status_code == 409
    assert (await api.post(f"/v1/runs/{run_id}/close")).json()["run"]["state"] == "closed"
    assert (await api.delete(f"/v1/runs/{run_id}")).json() == {"payloads": 0}
    assert (await api.get(f"/v1/runs/{run_id}")).json()["code"] == "not_found"


async def test_a_run_opened_twice_with_a_key_is_one(api: httpx.AsyncClient) -> None:
    await open_run(api)
    opened = [
        (await api.post("/v1/runs", json={"policy": "pol"}, headers={"Idempotency-Key": "k"})).json()["id"]
        for _ in range(2)
    ]
    assert len(set(opened)) == 1
    other = {"policy": "pol", "name": "x"}
    clash = await api.post("/v1/runs", json=other, headers={"Idempotency-Key": "k"})
    assert (clash.status_code, clash.json()["field"]) == (409, "Idempotency-Key")


async def test_groups_and_rollouts(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api)
    groups = await submit(api, run_id, 3, key="k")
    assert await submit(api, run_id, 3, key="k") == groups
    await finished(api, room, run_id, 3)
    shown = (await api.get(f"/v1/groups/{groups[0]}")).json()
    assert shown["group"]["id"] == groups[0]
    assert shown["counts"] == {"queued": 0, "running": 0, "completed": 2, "failed": 0, "cancelled": 0}
    rollouts = (await api.get("/v1/rollouts", params={"group_id": groups[0]})).json()["items"]
    found = (await api.get(f"/v1/runs/{run_id}/groups", params={"state": "finished"})).json()
    assert [group["id"] for group in found["items"]] == groups
    rollout_id = rollouts[1]["id"]
    status = (await api.get(f"/v1/rollouts/{rollout_id}")).json()
    assert (status["rollout"]["index"], status["task"]["instruction"], status["stage"]) == (1, "act", None)
    assert (status["attempts"], status["last_attempt"]["outcome"]) == (1, "completed")
    attempts = (await api.get(f"/v1/rollouts/{rollout_id}/attempts")).json()["items"]
    assert attempts[0]["outcome"] == "completed"


async def pages(api: httpx.AsyncClient, path: str, limit: int) -> list[list[Any]]:
    """Every page of a list."""
    found: list[list[Any]] = []
    cursor: str | None = None
    while not found or cursor is not None:
        params = {"limit": str(limit)} | ({"cursor": cursor} if cursor else {})
        answer = await api.get(path, params=params)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["items"])
        cursor = answer.json()["next"]
    return found


async def test_policies_and_backends_are_paged(api: httpx.AsyncClient) -> None:
    names = [f"p{number}" for number in range(5)]
    for name in reversed(names):
        assert (await api.post("/v1/policies", json={**POLICY, "name": name})).status_code == 201
    found = await pages(api, "/v1/policies", 2)
    assert [[policy["spec"]["name"] for policy in page] for page in found] == [
        names[:2],
        names[2:4],
        names[4:],
    ]
    urls = [f"http://b:{number}" for number in range(1, 4)]
    for url in urls:
        assert (await api.post("/v1/policies/p0/backends", json={"url": url})).status_code == 201
    listed = await pages(api, "/v1/policies/p0/backends", 2)
    assert [[backend["spec"]["url"] for backend in page] for page in listed] == [urls[:2], urls[2:]]
    assert (await api.get("/v1/policies/none/backends")).status_code == 404


async def test_a_policy_has_only_so_many_backends(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "MAX_BACKENDS", 2)
    assert (await api.post("/v1/policies", json=POLICY)).status_code == 201
    made = [await api.post("/v1/policies/pol/backends", json={"url": f"http://b:{n}"}) for n in (1, 2, 3, 2)]
    assert [answer.status_code for answer in made] == [201, 201, 409, 201]


async def test_attempts_are_paged(api: httpx.AsyncClient, room: Room) -> None:
    retry = {"max_attempts": 3, "backoff_s": 0.001, "max_backoff_s": 0.001}
    run_id = await open_run(api, retry=retry)
    room.executor.play = fails(LOST)
    await submit(api, run_id, 1)
    await finished(api, room, run_id, 1)
    rollout_id = (await api.get("/v1/rollouts", params={"run_id": run_id})).json()["items"][0]["id"]
    found = await pages(api, f"/v1/rollouts/{rollout_id}/attempts", 2)
    assert [[attempt["epoch"] for attempt in page] for page in found] == [[1, 2], [3]]
    status = (await api.get(f"/v1/rollouts/{rollout_id}")).json()
    assert (status["attempts"], status["last_attempt"]["epoch"]) == (3, 3)
    bad = await api.get(f"/v1/rollouts/{rollout_id}/attempts", params={"cursor": "x"})
    assert (bad.status_code, bad.json()["field"]) == (400, "cursor")


async def test_checkpoints_are_paged(api: httpx.AsyncClient) -> None:
    run_id = await open_run(api)
    trainer = f"/v1/runs/{run_id}/trainers/t"
    for name in ("z", "y", "x"):
        assert (await api.post(f"{trainer}/commit", json={"name": name, "epoch": 0})).status_code == 200
    found = await pages(api, f"{trainer}/checkpoints", 2)
    assert [[checkpoint["name"] for checkpoint in page] for page in found] == [["z", "y"], ["x"]]


async def test_lists_are_paged_and_filtered(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api)
    await submit(api, run_id, 4)
    await finished(api, room, run_id, 4)
    seen: list[str] = []
    cursor: str | None = None
    pages = 0
    while pages == 0 or cursor is not None:
        params: dict[str, str] = {"run_id": run_id, "limit": "3", "state": "completed"}
        params |= {"cursor": cursor} if cursor else {}
        page = (await api.get("/v1/rollouts", params=params)).json()
        seen += [rollout["id"] for rollout in page["items"]]
        cursor = page["next"]
        pages += 1
    assert (len(seen), len(set(seen)), pages) == (8, 8, 3)
    none = (await api.get("/v1/rollouts", params={"run_id": run_id, "state": "failed"})).json()
    assert none["items"] == []


async def test_cancel(api: httpx.AsyncClient, room: Room) -> None:
    room.executor.play = None
    run_id = await open_run(api)
    [group] = await submit(api, run_id)
    await room.started(2)
    assert (await api.post(f"/v1/groups/{group}/cancel")).json() == {"ended": 0, "stopping": 2}
    rollout_id = room.executor.history[0].rollout_id
    assert (await api.post(f"/v1/rollouts/{rollout_id}/cancel")).json() == {"ended": 0, "stopping": 1}
    assert (await api.get(f"/v1/rollouts/{rollout_id}")).json()["stage"] == "init"


@pytest.mark.parametrize("form", ["application/msgpack", "application/json"])
async def test_delivery_in_both_forms(api: httpx.AsyncClient, room: Room, form: str) -> None:
    run_id = await open_run(api)
    groups = await submit(api, run_id, 2)
    await finished(api, room, run_id, 2)
    answer = await api.post(
        f"/v1/runs/{run_id}/deliveries", json={"trainer": "t", "wait_s": 0}, headers={"Accept": form}
    )
    assert answer.headers["content-type"].startswith(form)
    decode = msgspec.msgpack.decode if form.endswith("msgpack") else msgspec.json.decode
    delivery = decode(answer.content, type=Delivery)
    assert [group.group["id"] for group in delivery.groups] == groups
    sample = from_wire(delivery.groups[0].rollouts[1].samples[0])
    assert sample.ids.tolist() == [0, 1, 2, 3, 100, 101, 102]
    assert sample.logprobs.tolist() == [0, 0, 0, 0, -0.5, -0.5, -0.5]
    assert sample.rewards.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert delivery.lease is not None
    lease = delivery.lease["id"]
    assert (await api.post(f"/v1/deliveries/{lease}/renew", json={"ttl_s": 60})).status_code == 200
    assert (await api.post(f"/v1/deliveries/{lease}/renew")).status_code == 200
    assert (await api.post(f"/v1/deliveries/{lease}/ack")).json()["group_ids"] == groups


async def test_nack_commit_and_rewind(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api)
    [group] = await submit(api, run_id)
    await finished(api, room, run_id, 1)
    where, trainer = f"/v1/runs/{run_id}/deliveries", f"/v1/runs/{run_id}/trainers/default"

    async def lease() -> dict[str, Any]:
        answer = await api.post(where, json={"wait_s": 0})
        found: dict[str, Any] = answer.json()
        return found

    first = await lease()
    assert (await api.post(f"/v1/deliveries/{first['lease']['id']}/nack")).status_code == 204
    second = await lease()
    assert second["groups"][0]["group"]["id"] == group
    await api.post(f"/v1/deliveries/{second['lease']['id']}/ack")
    commit = await api.post(f"{trainer}/commit", json={"name": "c", "epoch": 0, "cursor": "9"})
    assert commit.json()["cursor"] == "9"
    assert (await api.get(f"{trainer}/checkpoints")).json()["items"][0]["name"] == "c"
    rewound = (await api.post(f"{trainer}/rewind", json={"name": "c"})).json()
    assert (rewound["epoch"], rewound["checkpoint"]["name"]) == (1, "c")
    assert (await lease())["lease"] is None
    assert (await api.post(f"{trainer}/rewind")).json()["checkpoint"] is None
    assert (await lease())["groups"][0]["group"]["id"] == group
    stale = await api.post(f"{trainer}/commit", json={"name": "d", "epoch": 0})
    assert (stale.status_code, stale.json()["code"]) == (409, "stale_epoch")


async def test_what_a_rollout_did(api: httpx.AsyncClient, room: Room) -> None:
    room.executor.play = None
    run_id = await open_run(api)
    await submit(api, run_id)
    await room.started(2)
    start = room.executor.history[0]
    segment = room.payloads.open_segment(run_id, start.attempt_id)
    where, attempt = f"/v1/rollouts/{start.rollout_id}", f"/v1/attempts/{start.attempt_id}"
    segment.append_call(a_call("c1"))
    live = (await api.get(f"{where}/trajectory")).json()
    assert (live["live"], live["total"], live["attempt_id"]) == (True, 1, start.attempt_id)
    segment.append_call(a_call("c2", parent="c1"))
    for line in ("one", "two", "three"):
        segment.append_log(line)
    segment.append_artifact("out/a.txt", b"\x00bytes")
    sealed = await segment.seal()
    room.executor.end(start.attempt_id, ended(start, payload=sealed.ref))

    async def met() -> bool:
        shown = (await api.get(where)).json()
        return bool(shown["rollout"]["state"] == RolloutState.COMPLETED.value)

    await room.until(met)
    tree = (await api.get(f"{where}/trajectory")).json()
    assert [(node["id"], node["parent"], node["sampled_tokens"]) for node in tree["calls"]] == [
        ("c1", None, 3),
        ("c2", "c1", 3),
    ]
    assert [message["role"] for message in tree["conversation"]] == ["user", "assistant"] * 2
    first = (await api.get(f"{where}/calls", params={"limit": 1})).json()
    assert (first["items"][0]["arrays"]["sampled_ids"]["data"], first["next"]) == ([100, 101, 102], "1")
    packed = await api.get(f"{where}/calls", headers={"Accept": "application/msgpack"})
    assert [call.id for call in msgspec.msgpack.decode(packed.content, type=RecordedCalls).items] == [
        "c1",
        "c2",
    ]
    raw = await api.get(f"{where}/samples", headers={"Accept": "application/msgpack"})
    assert len(msgspec.msgpack.decode(raw.content, type=list[WireSample])) == 1
    log = (await api.get(f"{attempt}/log", params={"limit": 2})).json()
    assert ([text for _, text in log["items"]], log["next"]) == (["one", "two"], "2")
    kept = (await api.get(f"{attempt}/artifacts")).json()["items"]
    assert kept == [{"path": "out/a.txt", "size_bytes": 6}]
    data = await api.get(f"{attempt}/artifacts/out/a.txt")
    assert (data.content, data.headers["content-type"]) == (b"\x00bytes", "application/octet-stream")
    assert (await api.get(f"{attempt}/artifacts/none")).status_code == 404


async def test_a_rollout_without_readable_payload_says_so(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api)
    await submit(api, run_id)
    await finished(api, room, run_id, 1)
    room.payloads.unreadable |= set(room.payloads.kept)
    rollout = (await api.get("/v1/rollouts", params={"run_id": run_id})).json()["items"][0]
    answer = await api.get(f"/v1/rollouts/{rollout['id']}/samples")
    assert (answer.status_code, "bad block" in answer.json()["detail"]) == (404, True)


async def test_check_stores_nothing(api: httpx.AsyncClient) -> None:
    run_id = await open_run(api)
    assert (await api.post("/v1/check", json={"groups": [GROUP]})).json() == {"groups": 1}
    bad = {**GROUP, "task": {**GROUP["task"], "image": "nowhere"}}
    refused = await api.post("/v1/check", json={"groups": [GROUP, bad]})
    assert (refused.status_code, refused.json()["field"]) == (400, "groups.1.task.image")
    assert (await api.get(f"/v1/runs/{run_id}/groups")).json()["items"] == []


async def test_status_health_and_metrics(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api)
    await submit(api, run_id)
    await finished(api, room, run_id, 1)
    assert (await api.get("/healthz")).json() == {"ok": True}
    assert (await api.get("/readyz")).json() == {"ready": True, "workers": 1}
    status = (await api.get("/v1/status")).json()
    assert (status["counters"]["rollouts_completed"], status["running"]) == (2, 0)
    text = (await api.get("/metrics")).text
    assert "rollserve_rollouts_completed_total 2.0" in text
    assert (
        'rollserve_http_requests_total{method="POST",route="/v1/runs/{run_id}/groups",status="201"} 1.0'
        in text
    )
    room.core.begin_stop()
    stopping = await api.get("/readyz")
    assert (stopping.status_code, stopping.headers["retry-after"]) == (503, "5")


async def test_the_description_has_bodies_answers_and_errors(api: httpx.AsyncClient) -> None:
    schema = (await api.get("/openapi.json")).json()
    names = set(schema["components"]["schemas"])
    operations = [operation for path in schema["paths"].values() for operation in path.values()]
    assert len(operations) >= 45
    text = msgspec.json.encode(schema).decode()
    for part in text.split('"$ref":"#/components/schemas/')[1:]:
        assert part.split('"')[0] in names
    submit_body = schema["paths"]["/v1/runs/{run_id}/groups"]["post"]["requestBody"]
    assert submit_body["content"]["application/json"]["schema"]["$ref"].endswith("SubmitGroups-Input")
    assert all("default" in operation["responses"] for operation in operations)
    assert (await api.get("/docs")).status_code == 200


async def test_a_policy_shows_what_was_found_of_its_template(api: httpx.AsyncClient, room: Room) -> None:
    await api.post("/v1/policies", json=POLICY)

    async def probed() -> bool:
        return (await api.get("/v1/policies/pol")).json()["template"] is not None

    await room.until(probed)
    assert (await api.get("/v1/policies/pol")).json()["template"]["keep"]["verdict"] == "exact"


async def test_samples_are_verified(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api)
    await submit(api, run_id)
    await finished(api, room, run_id, 1)
    (rollout, _) = (await api.get("/v1/rollouts", params={"run_id": run_id})).json()["items"]
    where = f"/v1/rollouts/{rollout['id']}/verify"
    found = (await api.post(where)).json()
    (sample,) = found["samples"]
    assert [each["check"] for each in sample["findings"]] == ["reply"]  # what the fake call says is not so
    assert sample["not_scored"] == "policy 'pol' has no active backend"
    unscored = (await api.post(where, params={"score": False})).json()["samples"][0]
    assert unscored["not_scored"] == "not asked for"
    wrong = await api.post(where, params={"backend_id": "be_none"})
    assert (wrong.status_code, wrong.json()["field"]) == (404, "backend_id")
    assert (await api.post(where, params={"max_difference": "-1"})).json()["field"] == "max_difference"
    assert (await api.post(where, params={"scores": "1"})).status_code == 400
    assert (await api.post("/v1/rollouts/rol_none/verify")).status_code == 404


async def test_runs_of_one_state_the_newest_first(api: httpx.AsyncClient, room: Room) -> None:
    ids = [(await room.run()).id for _ in range(3)]
    await room.core.runs.pause(ids[1])

    async def listed(**asked: str | int) -> list[str]:
        answer = (await api.get("/v1/runs", params=asked)).json()
        return [run["id"] for run in answer["items"]]

    assert await listed() == ids
    assert await listed(newest="true") == ids[::-1]
    assert await listed(newest="true", state="open") == [ids[2], ids[0]]
    first = (await api.get("/v1/runs", params={"newest": "true", "limit": 2})).json()
    assert await listed(newest="true", limit=2, cursor=first["next"]) == [ids[0]]
    assert (await api.get("/v1/runs", params={"state": "ajar"})).status_code == 400


async def test_the_status_counts_the_backends_of_each_policy(api: httpx.AsyncClient, room: Room) -> None:
    for name in ("lonely", "served"):
        spec = {"name": name, "model": "m", "tokenizer": "tiny"}
        assert (await api.post("/v1/policies", json=spec)).status_code == 201
    for n in (1, 2):
        added = await api.post("/v1/policies/served/backends", json={"url": f"http://b:{n}"})
        assert added.status_code == 201
    await api.post(f"/v1/policies/served/backends/{added.json()['id']}/drain")
    await api.post("/v1/policies/lonely/pause")
    policies = {each["name"]: each for each in (await api.get("/v1/status")).json()["policies"]}
    assert policies["lonely"] == {
        "name": "lonely",
        "version": 0,
        "paused": True,
        "backends": 0,
        "active": 0,
    }
    served = policies["served"]
    assert (served["paused"], served["backends"], served["active"]) == (False, 2, 1)
