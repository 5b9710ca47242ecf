"""Every attack of the suite, tried; and the table of the documentation, which says what came of it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.testing.attack_scene import Scene, scene
from rollserve.testing.attacks import ATTACKS, Attack, table

ROOT = Path(__file__).parents[2]
MARKS = ("<!-- attacks -->\n", "\n<!-- end of attacks -->")


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Scene]:
    runtime = BubblewrapRuntime(data_dir=tmp_path)
    report = runtime.report()
    if not report.usable:
        pytest.skip(f"bubblewrap can't be used here: {report.detail}")
    with tempfile.TemporaryDirectory(prefix="rollserve-attack-") as name:
        os.chmod(name, 0o755)
        async with scene(runtime, Path(name)) as stage:
            yield stage
            await runtime.close()


@pytest.mark.userns
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.kind}: {attack.name}")
async def test_attack(stage: Scene, attack: Attack) -> None:
    report = await asyncio.to_thread(stage.runtime.report)
    if attack.needs and attack.needs not in report.enforces:
        pytest.skip(f"not stopped here: {attack.needs} does not hold, and the report says so")
    if attack.perl and (await stage.box.exec("perl -e 1")).exit_code != 0:
        pytest.skip("the host has no perl")
    assert await attack.tries(stage) is attack.open
    assert (await stage.box.exec("echo on", timeout_s=60)).output == "on\n"


def test_the_table_says_what_is_tried() -> None:
    text = (ROOT / "docs/sandboxes.md").read_text()
    start, end = MARKS
    assert text.partition(start)[2].partition(end)[0] == table()
