"""A task source and a filter of the user's, on real parts, through a kill -9."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from rollserve.client import RunHandle
from rollserve.records.control import FilterRule, GroupRule, TaskSource
from rollserve.records.run import SourceState
from rollserve.testing.scripted import ScriptedEngine
from rollserve.wire import OpenRun
from tests.integration.conftest import Server, add_policy, descendants, gone, shell_task

TASKS = 16


def write(folder: Path) -> str:
    folder.mkdir()
    lines = [shell_task(metadata={"number": number}).model_dump_json() for number in range(TASKS)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    return "tasks.jsonl"


async def taken(run: RunHandle, most: int) -> list[int]:
    """Of up to so many groups, or until nothing comes any more."""
    numbers: list[int] = []
    async with aclosing(run.groups(auto_ack=False, prefetch=1)) as groups:
        async for group in groups:
            await group.ack()
            assert len(group.samples) == 2
            numbers.append(group.group.task.metadata["number"])
            if len(numbers) == most:
                break
    return numbers


async def test_each_task_once_and_only_what_the_filter_keeps(
    make_server: Callable[..., Server], tmp_path: Path, backend_url: str, engine: ScriptedEngine
) -> None:
    engine.latency_s = 0.02
    source = TaskSource(path=write(tmp_path / "sources"), num_rollouts=2, in_flight=4, shuffle_seed=1)
    server = make_server("workers.run_slots=8", f"source_dir={tmp_path / 'sources'}")
    await server.start()
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(
            OpenRun(
                policy="tiny",
                source=source,
                groups=GroupRule(oversample=1),
                filters=(FilterRule(name="my_filters:even", options={"rest": 0}),),
            )
        )
        numbers = await taken(run, 3)
        below = descendants(server.pid)
        server.kill()
        await gone(below)
        await server.start()
        numbers += await taken(run, TASKS)
        status = await run.status()
    assert sorted(numbers) == list(range(0, TASKS, 2))
    assert status.source is not None
    assert (status.source.state, status.source.position) == (SourceState.ENDED, TASKS)
    assert status.bins["groups"]["filtered:my_filters:even"].count == TASKS // 2
    assert {"delivered", "filtered"} <= set(status.bins["tokens"])
    assert status.counts["groups_open"] == 0
