"""Real harnesses, where they are installed: ``./scripts/test`` installs some of them, and
``ROLLSERVE_TEST_HARNESSES`` names another folder (``./scripts/harnesses`` fills one)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollserve.agent.harness.base import Dialect, is_installed
from rollserve.agent.harness.table import HARNESSES
from rollserve.testing.harness_trial import Trial, Trouble, try_all

pytestmark = [pytest.mark.harness, pytest.mark.userns, pytest.mark.timeout(400)]

OWN = Path(__file__).parents[2] / ".rollserve" / "harnesses"
FOLDER = os.environ.get("ROLLSERVE_TEST_HARNESSES", str(OWN))


def harness_folder(name: str) -> Path:
    """Skips where it is not installed, and says why as far as that is known."""
    if not FOLDER:
        pytest.skip("ROLLSERVE_TEST_HARNESSES names no folder of installed harnesses")
    folder = Path(FOLDER).absolute()
    if not is_installed(HARNESSES[name], folder):
        log = folder / "install.log"
        lines = log.read_text().splitlines() if log.exists() else []
        why = next((line for line in lines if line.startswith(f"{name}: not installed")), "")
        pytest.skip(why or f"{HARNESSES[name].folder} is not in {folder.name}")
    return folder


async def tried(name: str, dialects: Sequence[Dialect], trouble: Trouble | None = None) -> list[Trial]:
    """All through one service, and all completed."""
    folder = harness_folder(name)
    trials = await try_all([(name, each) for each in dialects], folder, trouble, say_log=False)
    for trial in trials:
        assert trial.completed, (trial.dialect, trial.why, trial.log)
        assert trial.trained == trial.sampled > 0, trial.dialect
        assert trial.lost == {}, trial.dialect
    return trials


@pytest.mark.parametrize(
    ("name", "dialects"),
    [
        ("pi", list(Dialect)),
        ("mini-swe-agent", [Dialect.CHAT]),
        ("codex", [Dialect.RESPONSES]),
        ("claude-code", [Dialect.MESSAGES]),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
async def test_it_edits_a_file_and_every_sampled_token_is_trained(name: str, dialects: list[Dialect]) -> None:
    for trial in await tried(name, dialects):
        assert trial.calls == 4
        assert (trial.branches, trial.sequences) == ([], 1)


@pytest.mark.parametrize(
    ("name", "dialect", "dropped"),
    [
        ("pi", Dialect.CHAT, 2),
        ("mini-swe-agent", Dialect.CHAT, 2),
        ("codex", Dialect.RESPONSES, 2),
        ("gemini-cli", Dialect.GENERATE_CONTENT, 1),
    ],
)
async def test_a_request_sent_again_over_another_connection_is_sampled_once(
    name: str, dialect: Dialect, dropped: int
) -> None:
    """Once dropped before the reply, and (where the client survives it) once in its middle."""
    (trial,) = await tried(name, [dialect], Trouble.CONNECTION)
    assert sum(line.startswith("proxy: dropped") for line in trial.log) == dropped
    assert trial.generations == trial.calls == 4


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("pi", Dialect.CHAT),
        ("codex", Dialect.RESPONSES),
        ("claude-code", Dialect.MESSAGES),
        ("gemini-cli", Dialect.GENERATE_CONTENT),
        ("openhands", Dialect.CHAT),
    ],
)
async def test_a_small_context_is_compacted_and_the_work_goes_on(name: str, dialect: Dialect) -> None:
    (trial,) = await tried(name, [dialect], Trouble.COMPACTION)
    assert trial.labels["compaction"] >= 2
