"""Code of the user's that is edited while the server runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput
from rollserve.records.task import GraderSpec
from tests.integration.conftest import Server, one


async def test_an_edited_grader_gives_the_rewards_and_its_version(
    make_server: Callable[..., Server], backend_url: str, tmp_path: Path
) -> None:
    server = make_server()
    server.code = tmp_path / "code"
    server.code.mkdir()
    mine = server.code / "mine.py"
    mine.write_text("def grade(grading):\n    return 0.25\n")
    await server.start()
    async with server.client() as client:

        async def graded(name: str = "mine:grade") -> tuple[float | None, str]:
            [rollout] = (await one(client, backend_url, grader=GraderSpec(name=name))).rollouts
            attempt = (await client.rollout(rollout.rollout.id)).last_attempt
            assert attempt is not None
            return rollout.reward, attempt.code[name]

        first, old = await graded()
        mine.write_text("def grade(grading):\n    return 0.75\n\ndef another(grading):\n    return 0.5\n")
        second, new = await graded()
        third, _ = await graded("mine:another")
        mine.write_text("def grade(:\n")
        with pytest.raises(InvalidInput, match="can't be loaded") as caught:
            await graded()
    assert (first, second, third) == (0.25, 0.75, 0.5)
    assert old != new
    assert (caught.value.field or "").endswith("task.grader.name")
