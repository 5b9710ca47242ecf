"""Real harnesses, where they are installed: ``ROLLSERVE_TEST_HARNESSES`` names their folder
(``./scripts/harnesses`` fills one)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollserve.agent.harness.base import Dialect
from rollserve.agent.harness.table import HARNESSES
from rollserve.client import Client
from rollserve.testing.harness_trial import Trouble, attempt, scripted_policy, service, try_all

FOLDER = os.environ.get("ROLLSERVE_TEST_HARNESSES", "")


def harness_folder(name: str) -> Path:
    row = HARNESSES[name]
    if not FOLDER:
        pytest.skip("ROLLSERVE_TEST_HARNESSES names no folder of installed harnesses")
    if not (Path(FOLDER) / row.folder / "bin" / row.program).exists():
        pytest.skip(f"{row.folder} is not in {FOLDER}")
    return Path(FOLDER).absolute()


@pytest.mark.harness
@pytest.mark.userns
@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        *(("pi", dialect) for dialect in Dialect),
        ("mini-swe-agent", Dialect.CHAT),
        ("codex", Dialect.RESPONSES),
        ("claude-code", Dialect.MESSAGES),
    ],
)
async def test_it_edits_a_file_and_every_sampled_token_is_trained(
    tmp_path: Path, name: str, dialect: Dialect
) -> None:
    folder = harness_folder(name)
    async with service(folder, tmp_path) as url, Client(url) as client, scripted_policy(client):
        trial = await attempt(client, name, dialect)
    assert trial.completed, (trial.why, trial.log)
    assert trial.calls == 4
    assert (trial.branches, trial.sequences) == ([], 1)
    assert trial.trained == trial.sampled > 0
    assert trial.lost == {}


@pytest.mark.harness
@pytest.mark.userns
@pytest.mark.parametrize(
    ("name", "dialect"),
    [("pi", Dialect.CHAT), ("mini-swe-agent", Dialect.CHAT), ("codex", Dialect.RESPONSES)],
)
async def test_a_request_sent_again_over_another_connection_is_sampled_once(
    name: str, dialect: Dialect
) -> None:
    """Once dropped before the reply, once in its middle."""
    (trial,) = await try_all([(name, dialect)], harness_folder(name), Trouble.CONNECTION, say_log=False)
    assert trial.completed, (trial.why, trial.log)
    assert sum(line.startswith("proxy: dropped") for line in trial.log) == 2
    assert trial.generations == trial.calls == 4
    assert trial.trained == trial.sampled > 0


@pytest.mark.harness
@pytest.mark.userns
@pytest.mark.parametrize(
    ("name", "dialect"),
    [("pi", Dialect.CHAT), ("codex", Dialect.RESPONSES), ("claude-code", Dialect.MESSAGES)],
)
async def test_a_small_context_is_compacted_and_the_work_goes_on(name: str, dialect: Dialect) -> None:
    (trial,) = await try_all([(name, dialect)], harness_folder(name), Trouble.COMPACTION, say_log=False)
    assert trial.completed, (trial.why, trial.log)
    assert trial.labels["compaction"] >= 2
    assert trial.trained == trial.sampled > 0
    assert trial.lost == {}
