"""What ``rollserve drift`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollserve.cli import drift
from rollserve.records.drift import DriftCause, RolloutDrift
from tests.integration.conftest import Server, add_policy, shell_task

from .test_cli_commands import as_json, rollserve


def cause(name: str, times: int, untrainable: int = 0) -> DriftCause:
    absorbed = 0 if untrainable else times
    return DriftCause(cause=name, times=times, absorbed=absorbed, untrainable=untrainable)


FOUND = [
    RolloutDrift(rollout_id="rol_1", attempt_id="a", calls=3, sampled=90, causes=[cause("newline", 2)]),
    RolloutDrift(
        rollout_id="rol_2",
        attempt_id="b",
        calls=2,
        sampled=10,
        causes=[cause("backend_ids", 1, 10), cause("newline", 4)],
    ),
]
PLACE: dict[str, Any] = {
    "call_id": "mc_1",
    "label": "continuation",
    "drift": {
        "cause": "newline",
        "absorbed": True,
        "at_token": 7,
        "expected_text": "[b]\n",
        "found_text": "",
    },
}


def test_a_run_is_summed_by_cause_the_dearest_first(capsys: pytest.CaptureFixture[str]) -> None:
    drift._of_run("run_1", FOUND, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(each["cause"], each["times"], each["untrainable"]) for each in found["causes"]] == [
        ("backend_ids", 1, 10),
        ("newline", 6, 0),
    ]
    drift._of_run("run_1", FOUND, as_json=False)
    text = capsys.readouterr().out
    assert "2 rollouts, 100 sampled tokens" in text
    assert text.index("backend_ids") < text.index("newline")
    assert "rollserve drift rol_2" in text


def test_places_of_a_rollout_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    drift._of_rollout("rol_1", [PLACE] * (drift.SHOWN + 1), as_json=False)
    text = capsys.readouterr().out
    assert "21 places" in text
    assert "'[b]\\n'" in text
    assert "and 1 more" in text


async def test_drift_of_a_run_that_has_none(server: Server, backend_url: str, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(shell_task().model_dump_json())
    async with server.client() as client:
        await add_policy(client, backend_url)
    at = ("--url", server.url)
    submitted = await as_json("submit", str(tasks), "--policy", "tiny", "--wait", *at)
    found = await as_json("drift", submitted["run_id"], *at)
    (rollout,) = found["rollouts"]
    assert found["causes"] == []
    assert rollout["calls"] > 0
    assert (await as_json("drift", rollout["rollout_id"], *at)) == {"places": []}
    code, text, _ = await rollserve("drift", submitted["run_id"], *at)
    assert (code, "nothing differs" in text) == (0, True)
    assert (await rollserve("drift", "run_none", *at))[0] == 1
