from __future__ import annotations

import httpx
import msgspec

from rollserve.records.call import Drift
from rollserve.rollouts.drift import CallDrift
from rollserve.testing.server_room import Room
from rollserve.wire import Delivery

from .test_api_routes import finished, open_run, submit


async def test_drift_of_a_run_and_of_a_rollout(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api)
    await submit(api, run_id)
    await finished(api, room, run_id, 1)
    found = (await api.get(f"/v1/runs/{run_id}/drift", params={"limit": 1})).json()
    (item,) = found["items"]
    assert (item["calls"], item["sampled"], item["causes"], item["note"]) == (1, 3, [], None)
    assert found["next"] is not None
    assert (await api.get(f"/v1/runs/{run_id}/drift", params={"cause": "x"})).json()["items"] == []
    places = await api.get(f"/v1/rollouts/{item['rollout_id']}/drift")
    assert places.json() == {"items": [], "next": None}
    assert (await api.get("/v1/runs/run_none/drift")).status_code == 404
    assert (await api.get("/v1/rollouts/rol_none/drift")).status_code == 404
    assert (await api.get(f"/v1/runs/{run_id}/drift", params={"causes": "x"})).status_code == 400


async def test_a_delivery_says_what_became_of_the_tokens(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api)
    await submit(api, run_id)
    await finished(api, room, run_id, 1)
    answer = await api.post(f"/v1/runs/{run_id}/deliveries", headers={"Accept": "application/msgpack"})
    (group,) = msgspec.msgpack.decode(answer.content, type=Delivery).groups
    (tokens, _) = [rollout.tokens for rollout in group.rollouts]
    assert tokens is not None
    assert (tokens.sampled, tokens.trained, tokens.left_out) == (3, 3, {})
    assert tokens.by_label["continuation"].calls == 1


async def test_bad_labels(api: httpx.AsyncClient) -> None:
    await open_run(api)
    odd = await api.post("/v1/runs", json={"policy": "pol", "train_labels": ["sides"]})
    assert odd.json()["field"].startswith("train_labels")


async def test_a_place_has_ids_and_text(api: httpx.AsyncClient, room: Room) -> None:
    run_id = await open_run(api)
    await submit(api, run_id)
    await finished(api, room, run_id, 1)
    drift = Drift(cause="newline", at_token=3, expected=(1,), found=(2, 3), expected_text="\n")
    for payload in room.payloads.kept.values():
        payload.calls[:] = [msgspec.structs.replace(call, drift=(drift,)) for call in payload.calls]
    (item, _) = (await api.get(f"/v1/runs/{run_id}/drift")).json()["items"]
    (place,) = (await api.get(f"/v1/rollouts/{item['rollout_id']}/drift")).json()["items"]
    assert msgspec.convert(place, CallDrift).drift == drift
    assert [cause["cause"] for cause in item["causes"]] == ["newline"]
