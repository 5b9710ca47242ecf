"""Ids that can be nobody's, and cursors of other lists: told at once, by every route."""

from __future__ import annotations

import re

import httpx
import pytest

from rollserve.testing.server_room import Room

POLICY = {"name": "pol", "model": "m", "tokenizer": "tiny"}
NOBODYS = ["a" * 60_000, "a" * 129, "%20", "..%2e", "a%00b", "a%0a", "%25_", "run_\u00fc"]


async def run_of(api: httpx.AsyncClient) -> str:
    await api.post("/v1/policies", json=POLICY)
    return str((await api.post("/v1/runs", json={"policy": "pol"})).json()["id"])


async def routes(api: httpx.AsyncClient) -> list[tuple[str, str]]:
    paths = (await api.get("/openapi.json")).json()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]


@pytest.mark.parametrize("given", NOBODYS)
async def test_no_route_looks_for_what_is_no_id(api: httpx.AsyncClient, room: Room, given: str) -> None:
    asked = 0
    for method, path in await routes(api):
        names = [name for name in re.findall(r"{(\w+)}", path) if name != "path"]
        for wrong in names:
            fills = {name: given if name == wrong else "run_0" for name in (*names, "path")}
            answer = await api.request(method, path.format_map(fills))
            asked += 1
            assert (answer.status_code, answer.json()["field"]) == (404, wrong), (method, path)
            assert "is no id or name of anything" in answer.json()["detail"]
            assert len(answer.content) < 1000
    assert asked > 50


@pytest.mark.parametrize("given", NOBODYS)
async def test_no_filter_looks_for_what_is_no_id(api: httpx.AsyncClient, given: str) -> None:
    run = await run_of(api)
    for url in (
        f"/v1/rollouts?run_id={given}",
        f"/v1/rollouts?group_id={given}",
        f"/v1/events?run_id={given}",
        f"/v1/rollouts/rol_1/calls?attempt_id={given}",
        f"/v1/rollouts/rol_1/trajectory?attempt_id={given}",
        f"/v1/runs/{run}/evaluation/compare?other={given}",
    ):
        answer = await api.get(url)
        assert answer.status_code == 400, url
        assert answer.json()["field"] in url
    answer = await api.post(f"/v1/rollouts/rol_1/verify?backend_id={given}")
    assert (answer.status_code, answer.json()["field"]) == (400, "backend_id")


async def test_a_run_is_still_found_by_its_name_in_the_hint(api: httpx.AsyncClient) -> None:
    await api.post("/v1/policies", json=POLICY)
    run = (await api.post("/v1/runs", json={"policy": "pol", "name": "first.try"})).json()["id"]
    answer = await api.get("/v1/runs/first.try")
    assert answer.status_code == 404
    assert run in answer.json()["hint"]


@pytest.mark.parametrize("cursor", ["9223372036854775808", "9" * 200, "-1", "x"])
async def test_what_is_no_cursor_of_a_list_is_refused_by_each(api: httpx.AsyncClient, cursor: str) -> None:
    run = await run_of(api)
    other = await run_of(api)
    for url in (
        "/v1/runs?",
        f"/v1/runs/{run}/groups?",
        f"/v1/runs/{run}/evaluation/tasks?",
        f"/v1/runs/{run}/evaluation/compare/tasks?other={other}&",
    ):
        answer = await api.get(f"{url}cursor={cursor}")
        assert (answer.status_code, answer.json()["field"]) == (400, "cursor"), url


async def test_a_cursor_beyond_the_newest_event_is_told_it(api: httpx.AsyncClient, room: Room) -> None:
    """It is of an older data folder: it would wait for what has long been."""
    await run_of(api)
    newest = (await room.store.list_events(after=0))[-1].seq
    answer = await api.get(f"/v1/events?after={newest + 1}")
    assert (answer.status_code, answer.json()["field"]) == (400, "after")
    assert f"the newest event is {newest}:" in answer.json()["hint"]
    answer = await api.get("/v1/events", headers={"Last-Event-ID": str(10**17)})
    assert (answer.status_code, answer.json()["field"]) == (400, "Last-Event-ID")


async def test_ready_says_so_while_nothing_can_be_written(api: httpx.AsyncClient, room: Room) -> None:
    await room.until(lambda: room.core.workers > 0)
    assert (await api.get("/readyz")).status_code == 200
    run = await run_of(api)
    await room.store._write(lambda tx: tx.conn.exec_driver_sql("PRAGMA max_page_count = 1").scalar())
    task = {"instruction": "a" * 500_000, "grader": {"name": "exact"}}
    refused = await api.post(f"/v1/runs/{run}/groups", json={"groups": [{"task": task}]})
    assert refused.status_code == 503
    answer = await api.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert "full" in answer.json()["detail"]
    await room.store._write(lambda tx: tx.conn.exec_driver_sql("PRAGMA max_page_count = 1000000").scalar())
    assert (await api.get("/readyz")).status_code == 200
