"""Every token that workers recorded is in one bin, on a real server under trouble; ``bench/token_bins.py`` is
the same with 10,000 rollouts."""

from __future__ import annotations

from pathlib import Path

from rollserve.testing.token_trial import Trial


async def test_recorded_is_what_is_in_bins_and_trained_what_was_delivered(tmp_path: Path) -> None:
    found = await Trial(folder=tmp_path, rollouts=160, kills=1).run()
    assert found.rollouts >= 160
    assert found.recorded == sum(found.bins.values()) > 0
    assert found.trained == found.bins["delivered"] > 0
    assert not found.bins.get("waiting")
    assert found.sampled >= found.recorded
    assert found.did["workers killed"] == 1
