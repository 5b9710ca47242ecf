"""What any grader must do. Subclass it in a test module and give it a ``subject``::

    class TestMine(GraderConformance):
        @pytest.fixture
        def subject(self) -> GraderSubject:
            return GraderSubject(grader=MyGrader("42"), right="42", wrong="41")

A grader that wants a sandbox gets the one that ``sandbox`` makes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from rollserve.errors import EpisodeFailure
from rollserve.grader.base import Grade, Grader, Grading
from rollserve.sandbox.base import Sandbox
from rollserve.testing.fakes import FakeSandbox, some_grading

DEADLINE_S = 60.0


@dataclass(kw_only=True)
class GraderSubject:
    """``right`` is an answer that earns more than ``wrong``; None where the answer does not matter."""

    grader: Grader
    right: str | None
    wrong: str | None
    sandbox: Callable[[], Sandbox] = FakeSandbox

    def grading(self, answer: str | None) -> Grading:
        wants = self.grader.carry is not None
        return some_grading(answer, sandbox=self.sandbox() if wants else None)

    async def grade(self, answer: str | None) -> Grade:
        async with asyncio.timeout(DEADLINE_S):
            return await self.grader.grade(self.grading(answer))


class GraderConformance:
    @pytest.fixture
    async def subject(self) -> GraderSubject:
        raise NotImplementedError

    async def test_what_it_carries_are_paths(self, subject: GraderSubject) -> None:
        carry = subject.grader.carry
        assert carry is None or (isinstance(carry, tuple) and all(isinstance(path, str) for path in carry))

    async def test_a_grade_is_finite_and_for_calls_that_took_place(self, subject: GraderSubject) -> None:
        grade = await subject.grade(subject.right)
        assert math.isfinite(grade.reward)
        assert all(math.isfinite(reward) for reward in grade.call_rewards.values())
        assert set(grade.call_rewards) <= set(subject.grading(None).call_ids)

    async def test_right_earns_more_than_wrong(self, subject: GraderSubject) -> None:
        if subject.right is not None:
            right, wrong = await subject.grade(subject.right), await subject.grade(subject.wrong)
            assert right.reward > wrong.reward

    async def test_the_same_again_earns_the_same(self, subject: GraderSubject) -> None:
        assert (await subject.grade(subject.right)).reward == (await subject.grade(subject.right)).reward

    @pytest.mark.parametrize("answer", [None, "", " \n", "\x00", "ü" * 1000, "1" * 100_000, "{" * 500])
    async def test_no_answer_crashes_it(self, subject: GraderSubject, answer: str | None) -> None:
        """A typed failure is an answer too: nothing else may leave it."""
        try:
            grade = await subject.grade(answer)
        except EpisodeFailure:
            return
        assert math.isfinite(grade.reward)
