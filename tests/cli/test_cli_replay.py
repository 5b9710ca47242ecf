"""``rollserve regrade`` and ``rollserve export``, against a real server with real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollserve.cli.replay import routes_of, settings_of
from rollserve.errors import InvalidInput
from rollserve.records.export import ExportSettings
from rollserve.records.regrade import JudgeRoute, RegradingState
from rollserve.records.task import GraderSpec
from rollserve.testing.scripted import ScriptedEngine
from rollserve.wire import OpenRun
from tests.integration.conftest import Server, add_policy, finished, shell_task

from .test_cli_commands import as_json, rollserve

COUNTS = GraderSpec(name="command", options={"command": "grep -q 42 note", "carry": ["note"]})


def test_settings_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        settings_of({"staleness": {"max_staleness": -1}})
    assert caught.value.field == "staleness.max_staleness"
    assert settings_of({"sequences": "calls"}).sequences == "calls"


def test_routes_that_are_none() -> None:
    given = {"judge": "jury", "other": {"policy": "p", "sampling": {"temperature": 0}}}
    found = routes_of(given)
    assert found["judge"] == JudgeRoute(policy="jury")
    assert found["other"].sampling is not None
    for bad, field in (({"judge": 3}, "routes.judge"), ({"judge": {"polcy": "x"}}, "routes.judge.policy")):
        with pytest.raises(InvalidInput) as caught:
            routes_of(bad)
        assert caught.value.field == field


async def test_a_run_graded_again_and_exported(
    server: Server, backend_url: str, engine: ScriptedEngine, tmp_path: Path
) -> None:
    async with server.client() as client:
        await add_policy(client, backend_url)
        kept = await client.open_run(OpenRun(policy="tiny", keep_files=("/workspace",)))
        bare = await client.open_run(OpenRun(policy="tiny"))
        for run in (kept, bare):
            await run.submit([shell_task(metadata={"n": 7})], num_rollouts=2)
            await finished(run, 1)
        asked = engine.started
        regrade = await kept.regrade(COUNTS, key="k")
        assert (await kept.regrade(COUNTS, key="k")).id == regrade.id
        assert [each.id for each in await kept.regrades()] == [regrade.id]
        at = ("--url", server.url)
        option = ("--option", "command=exit 3", "--option", 'carry=["note"]')
        zero = await as_json("regrade", kept.id, "--grader", "command", *option, *at)
        assert [each["graded"]["reward"] for each in zero["gradings"]] == [0.0, 0.0]
        assert [each["before"] for each in zero["gradings"]] == [1.0, 1.0]
        code, out, _ = await rollserve("regrade", bare.id, "--grader", "command", *option, *at)
        assert code == 1
        assert "impossible" in out
        assert "keep_files" in out
        judge = ("--route", "judge=nobody")
        code, _, err = await rollserve("regrade", kept.id, "--grader", "command", *option, *judge, *at)
        assert code != 0
        assert "routes.judge.policy" in err
        assert (await client.regrade(regrade.id)).counts["graded"] == 2
        rewards = [each.reward async for each in client.gradings(regrade.id, state="graded")]
        assert rewards == [1.0, 1.0]
        (group,) = [each async for each in kept.export(ExportSettings(regrade=zero["regrade"]["id"]))]
        assert [rollout.rollout.reward for rollout in group.rollouts] == [0.0, 0.0]
        file = tmp_path / "samples.jsonl"
        sums = await as_json("export", kept.id, "--out", str(file), "--set", "sequences=calls", *at)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert (sums["rollouts"], sums["samples"], len(lines)) == (2, 6, 6)
        assert lines[0]["metadata"] == {"n": 7}
        assert sum(sum(line["loss_mask"]) for line in lines) == sums["trained_tokens"]
        code, out, err = await rollserve("export", kept.id, *at)
        assert (code, len(out.splitlines())) == (0, 2)
        assert "2 samples" in err
        assert engine.started == asked
        states = {each.state async for each in client.gradings(regrade.id)}
        assert states == {RegradingState.GRADED}
