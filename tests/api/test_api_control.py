"""Groups, staleness, sources, bins: through the routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rollserve.executor.base import StartAttempt
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fakes_server import FakeExecutor, a_call, completes, ended
from rollserve.testing.server_room import Room
from rollserve.wire import MSGPACK, Delivery, RunStatus

TASK = {"instruction": "act", "grader": {"name": "exact"}}


async def open_run(api: httpx.AsyncClient, **settings: Any) -> str:
    policy = {"name": "pol", "model": "m", "tokenizer": "tiny"}
    assert (await api.post("/v1/policies", json=policy)).status_code == 201
    answer = await api.post("/v1/runs", json={"policy": "pol", **settings})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def lease(api: httpx.AsyncClient, run_id: str, **asked: Any) -> dict[str, Any]:
    answer = await api.post(f"/v1/runs/{run_id}/deliveries", json={"wait_s": 20, **asked})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def status(api: httpx.AsyncClient, run_id: str) -> RunStatus:
    return RunStatus.model_validate_json((await api.get(f"/v1/runs/{run_id}")).content)


async def test_a_group_with_a_rule(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api, groups={"oversample": 1})
    body = {"groups": [{"task": TASK, "num_rollouts": 2}, {"task": TASK, "num_rollouts": 2, "rule": {}}]}
    submitted = (await api.post(f"/v1/runs/{run_id}/groups", json=body)).json()["groups"]
    totals = [(await api.get(f"/v1/groups/{group['id']}")).json()["group"]["total"] for group in submitted]
    assert totals == [3, 2]


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"min_usable": 9}, "groups.0.rule.min_usable"),
        ({"min_usabel": 1}, "groups.0.rule.min_usabel"),
        ({"stragglers": "cancle"}, "groups.0.rule.stragglers"),
        ({"deadline_s": 0}, "groups.0.rule.deadline_s"),
    ],
)
async def test_a_bad_rule_is_named(api: httpx.AsyncClient, rule: dict[str, Any], field: str) -> None:
    run_id = await open_run(api)
    body = {"groups": [{"task": TASK, "num_rollouts": 2, "rule": rule}]}
    answer = await api.post(f"/v1/runs/{run_id}/groups", json=body)
    assert (answer.status_code, answer.json()["field"]) == (400, field)
    assert (await status(api, run_id)).counts["groups_open"] == 0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"staleness": {"groups_per_version": 4}}, "staleness.groups_per_version"),
        ({"filters": [{"name": "zero_varianze"}]}, "filters.0.name"),
        ({"source": {"path": "/etc/passwd"}}, "source.path"),
        ({"source": {"tasks": [{"instruction": "x"}]}}, "source.tasks.0.grader"),
        ({"groups": {"stragglers": "replace"}}, "groups.straggler_s"),
        ({"purpose": "evaluation", "filters": [{"name": "too_easy"}]}, "filters"),
        ({"delivery": {"order": "submitted"}}, "delivery.order"),
        ({"priority": 10**6}, "priority"),
    ],
)
async def test_contradictions_of_a_run_are_named(
    api: httpx.AsyncClient, settings: dict[str, Any], field: str
) -> None:
    await open_run(api)
    answer = await api.post("/v1/runs", json={"policy": "pol", **settings})
    assert (answer.status_code, answer.json()["field"]) == (400, field)
    assert len((await api.get("/v1/runs")).json()["items"]) == 1


async def test_a_delivery_says_how_old_it_is_and_the_run_what_became_of_it(
    api: httpx.AsyncClient, room: Room
) -> None:
    run_id = await open_run(api, staleness={"max_staleness": 1, "on_stale": "mark"})
    await api.post("/v1/policies/pol/version", json={"version": 3})
    await api.post(f"/v1/runs/{run_id}/groups", json={"groups": [{"task": TASK, "num_rollouts": 2}]})
    delivered = await lease(api, run_id, max_tokens=1)
    rollout = delivered["groups"][0]["rollouts"][0]
    assert (rollout["staleness"], rollout["stale"], delivered["policy_version"]) == (3, True, 3)
    await api.post(f"/v1/deliveries/{delivered['lease']['id']}/ack")
    bins = (await status(api, run_id)).bins
    assert bins["staleness"]["3"].count == 2
    assert bins["tokens"]["delivered"].count == 2
    text = (await api.get("/metrics")).text
    assert 'rollserve_delivered_rollouts_by_staleness{versions="3"} 2.0' in text
    assert 'rollserve_sampled_tokens_by_fate{fate="delivered"}' in text


async def test_a_source_ends_and_whoever_waits_is_told(
    api: httpx.AsyncClient, room: Room, tmp_path: Path
) -> None:
    room.executor.play = completes(room.payloads)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(TASK) + "\n" for _ in range(3)))
    run_id = await open_run(api, source={"path": "tasks.jsonl", "num_rollouts": 2})
    taken = 0
    while (delivered := await lease(api, run_id))["over"] is None:
        taken += len(delivered["groups"])
        await api.post(f"/v1/deliveries/{delivered['lease']['id']}/ack")
    assert (taken, delivered["over"][0]) == (3, "source_ended")
    source = (await status(api, run_id)).source
    assert source is not None
    assert (source.state, source.position) == ("ended", 3)
    packed = await api.post(f"/v1/runs/{run_id}/deliveries", json={"wait_s": 0}, headers={"Accept": MSGPACK})
    assert msgspec.msgpack.decode(packed.content, type=Delivery).over is not None


async def test_what_was_left_out_or_too_old_is_counted_and_shown(
    api: httpx.AsyncClient, room: Room, tmp_path: Path
) -> None:
    def play(executor: FakeExecutor, worker_id: str, start: StartAttempt) -> None:
        ref = room.payloads.keep(start.attempt_id, AttemptPayload(calls=[a_call()]))
        attempt = ended(start, reward=float(start.index), payload=ref)
        executor.end(start.attempt_id, attempt.model_copy(update={"counts": {"sampled_tokens": 3}}))

    room.executor.play = play
    line = json.dumps(TASK)
    (tmp_path / "tasks.jsonl").write_text(f"{line}\n{{broken\n{line}\n")
    run_id = await open_run(
        api,
        source={"path": "tasks.jsonl", "num_rollouts": 2, "on_broken_line": "skip"},
        filters=[{"name": "too_hard", "threshold": 0.5}],
        staleness={"max_staleness": 1},
    )
    assert (await lease(api, run_id))["over"] is not None
    old = await open_run(api, staleness={"max_staleness": 1})
    await api.post("/v1/policies/pol/version", json={"version": 3})
    await api.post(f"/v1/runs/{old}/groups", json={"groups": [{"task": TASK, "num_rollouts": 2}]})
    delivered = await lease(api, old)
    rollouts = delivered["groups"][0]["rollouts"]
    assert [len(each["samples"]) for each in rollouts] == [0, 0]
    await api.post(f"/v1/deliveries/{delivered['lease']['id']}/ack")
    groups = {name: each.count for name, each in (await status(api, run_id)).bins["groups"].items()}
    assert groups == {"filtered:too_hard": 2, "broken_lines": 1}
    lengths = (await status(api, old)).bins["stale_length"]
    assert {name: each.count for name, each in lengths.items()} == {"2-3": 2}
    text = (await api.get("/metrics")).text
    assert 'rollserve_stale_rollouts_by_length{tokens="2-3"} 2.0' in text
    assert 'rollserve_groups_by_control{what="filtered:too_hard"} 2.0' in text
    assert 'rollserve_groups_by_control{what="broken_lines"} 1.0' in text
