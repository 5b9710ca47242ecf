"""Evaluations over HTTP."""

from __future__ import annotations

import httpx
import pytest

from rollserve.client import Client
from rollserve.records.policy import PolicySpec
from rollserve.testing.server_room import Room, a_task
from rollserve.wire import OpenRun


async def evaluated(room: Room, client: Client, *tasks: str) -> str:
    await room.core.policies.create(PolicySpec(name="pol", model="m", tokenizer="tiny"))
    run = await client.open_run(OpenRun(policy="pol", purpose="evaluation"))
    await run.submit([a_task(instruction=text) for text in tasks], num_rollouts=4)

    async def over() -> bool:
        return (await room.core.runs.counts(run.id))["groups_finished"] == len(tasks)

    await room.until(over)
    return run.id


async def test_a_client_reads_what_a_run_found(room: Room, served: httpx.AsyncClient) -> None:
    async with Client(str(served.base_url)) as client:
        one = await client.run(await evaluated(room, client, "a", "b", "c"))
        two = await client.run(await evaluated(room, client, "b", "c", "d"))
        found = await one.evaluation(k=(1, 4), threshold=0.5, confidence=0.9)
        assert (found.tasks, found.graded, found.threshold, found.confidence) == (3, 12, 0.5, 0.9)
        assert set(found.pass_at) == {1, 4}
        assert found.pass_at[4].value == 1.0
        assert [task.passed async for task in one.evaluation_tasks()] == [4, 4, 4]
        assert (await one.evaluation(threshold=2)).pass_at[1].value == 0.0
        compared = await one.compare(two.id, k=(2,))
        assert [task.title for task in compared.ours.only_here] == ["a"]
        assert (compared.tasks, compared.ties, compared.pass_at[2].value) == (2, 2, 0.0)
        assert sorted([task.title async for task in one.compare_tasks(two.id)]) == ["b", "c"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("k=0", "k"),
        ("k=", "k"),
        ("k=1,x", "k"),
        ("k=-1", "k"),
        ("k=" + ",".join(map(str, range(1, 18))), "k"),
        ("threshold=nan", "threshold"),
        ("confidence=1", "confidence"),
        ("ks=1", "ks"),
    ],
)
async def test_what_can_not_be_reckoned_is_named(
    room: Room, served: httpx.AsyncClient, query: str, field: str
) -> None:
    async with Client(str(served.base_url)) as client:
        run_id = await evaluated(room, client, "a")
    answer = await served.get(f"/v1/runs/{run_id}/evaluation?{query}")
    assert (answer.status_code, answer.json()["field"]) == (400, field)


async def test_tasks_come_in_pages(room: Room, served: httpx.AsyncClient) -> None:
    async with Client(str(served.base_url)) as client:
        run_id = await evaluated(room, client, "a", "b", "c")
    first = (await served.get(f"/v1/runs/{run_id}/evaluation/tasks?limit=2")).json()
    last = (await served.get(f"/v1/runs/{run_id}/evaluation/tasks?limit=2&cursor={first['next']}")).json()
    assert (len(first["items"]), len(last["items"]), last["next"]) == (2, 1, None)
