"""The client against a real server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from rollserve.client import Client, SyncClient
from rollserve.client.http import to_error
from rollserve.errors import Conflict, InvalidInput, LeaseLost, NotFound, StaleEpoch, Unavailable
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.task import GraderSpec, Task
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend
from tests.integration.conftest import Server, add_policy, shell_task


async def test_errors_of_the_server_come_as_their_types(server: Server) -> None:
    async with server.client() as client:
        with pytest.raises(NotFound):
            await client.policy("nobody")
        with pytest.raises(InvalidInput, match="policy") as caught:
            await client.open_run(OpenRun(policy="nobody"))
        assert caught.value.field == "policy"


async def test_bad_tasks_are_refused_by_field_before_anything_is_stored(
    server: Server, backend_url: str
) -> None:
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        bad = {
            "groups.1.task.grader.name": shell_task(grader=GraderSpec(name="exakt")),
            "groups.1.task.runtime": shell_task(runtime="bubblewrp"),
            "groups.1.task.image": shell_task(image="/no/such/image"),
            "groups.1.task.tools.0": shell_task(tools=["shel"]),
        }
        for field, task in bad.items():
            with pytest.raises(InvalidInput) as caught:
                await run.submit([shell_task(), task], num_rollouts=1)
            assert caught.value.field == field
        assert (await run.status()).counts["groups_open"] == 0


async def test_a_backend_that_serves_another_model_is_refused(server: Server, backend_url: str) -> None:
    async with server.client() as client:
        await client.create_policy(CreatePolicy(name="p", model="scriptid", tokenizer="tiny"))
        with pytest.raises(InvalidInput, match="scripted"):
            await client.register_backend("p", RegisterBackend(url=backend_url))
        with pytest.raises(InvalidInput) as caught:
            await client.register_backend("p", RegisterBackend(url=server.url))
        assert caught.value.field == "url"


async def test_the_same_submission_again_makes_no_second_group(server: Server, backend_url: str) -> None:
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        first = await run.submit([shell_task()] * 3, num_rollouts=2, key="k")
        second = await run.submit([shell_task()] * 3, num_rollouts=2, key="k")
        assert [g.id for g in first] == [g.id for g in second]
        with pytest.raises(Conflict):
            await run.submit([shell_task(instruction="another")], num_rollouts=2, key="k")


async def test_commit_and_rewind_redeliver_and_fence(server: Server, backend_url: str) -> None:
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        await run.submit([shell_task()] * 4, num_rollouts=1)
        taken = []
        async with aclosing(run.groups(auto_ack=False, prefetch=1)) as groups:
            for _ in range(2):
                group = await anext(groups)
                await group.ack()
                taken.append(group)
        epoch = taken[0].epoch
        await run.commit("step-1", epoch=epoch, cursor="2")
        async with aclosing(run.groups(auto_ack=False, prefetch=1)) as groups:
            third = await anext(groups)
            await third.ack()
        rewound = await run.rewind("step-1")
        assert rewound.epoch > epoch
        assert rewound.checkpoint is not None
        assert rewound.checkpoint.cursor == "2"
        with pytest.raises((StaleEpoch, LeaseLost, Conflict)):
            await run.commit("late", epoch=epoch)
        async with aclosing(run.groups(auto_ack=False, prefetch=1)) as groups:
            again = []
            for _ in range(2):
                group = await anext(groups)
                await group.ack()
                again.append(group.group.id)
    assert third.group.id in again
    assert len({*again, *(group.group.id for group in taken)}) == 4


async def test_what_was_fetched_ahead_is_given_back(server: Server, backend_url: str) -> None:
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        submitted = await run.submit([shell_task()] * 6, num_rollouts=1)
        async with aclosing(run.groups(prefetch=4, ttl_s=5)) as groups:
            await anext(groups)
        seen: list[str] = []
        async with aclosing(run.groups(auto_ack=False, prefetch=2)) as groups, asyncio.timeout(90):
            while len(seen) < 6:
                group = await anext(groups)
                await group.ack()
                seen.append(group.group.id)
        assert sorted(seen) == sorted(g.id for g in submitted)


async def test_events_go_on_after_a_restart_of_the_server(server: Server, backend_url: str) -> None:
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        seen: list[int] = []
        async with aclosing(client.events(run_id=run.id)) as events, asyncio.timeout(60):
            seen.append((await anext(events)).seq)
            server.kill()
            await server.start()
            await run.submit([shell_task()], num_rollouts=1)
            while True:
                event = await anext(events)
                seen.append(event.seq)
                if event.type == "group.finished":
                    break
        assert seen == sorted(set(seen))


async def test_no_server_is_an_error_that_says_what_to_do() -> None:
    async with Client("http://127.0.0.1:9", patience_s=0.2) as client:
        with pytest.raises(Unavailable, match="rollserve serve"):
            await client.status()


def test_a_body_that_is_no_problem_document_is_still_an_error() -> None:
    error = to_error(500, b"<html>oops</html>", None)
    assert "oops" in str(error)


async def test_the_synchronous_client(server: Server, backend_url: str) -> None:
    def work() -> list[float | None]:
        with SyncClient(server.url) as client:
            renderer = RendererSpec(name="qwen3", options={"enable_thinking": False})
            client.create_policy(
                CreatePolicy(name="tiny", model="scripted", tokenizer="tiny", renderer=renderer)
            )
            client.register_backend("tiny", RegisterBackend(url=backend_url, kind=BackendKind.VLLM))
            run = client.open_run(OpenRun(policy="tiny"))
            run.submit([shell_task()], num_rollouts=2)
            for group in run.groups(prefetch=1):
                return group.rewards
        return []

    assert await asyncio.to_thread(work) == [1.0, 1.0]


def test_a_task_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="instrution"):
        Task.model_validate({"instrution": "x", "grader": {"name": "exact"}})
