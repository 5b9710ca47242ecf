"""The graders that ship, and one of a user's, against the suite for graders."""

from __future__ import annotations

import pytest

from rollserve.grader.base import Grader
from rollserve.grader.command import CommandGrader, CommandOptions
from rollserve.grader.exact import ExactGrader, ExactOptions
from rollserve.grader.math import MathGrader, MathOptions
from rollserve.grader.numeric import NumericGrader, NumericOptions
from rollserve.testing.grader_conformance import GraderConformance, GraderSubject
from rollserve.usercode.hosts import ZygoteHosts


class TestExact(GraderConformance):
    @pytest.fixture
    def subject(self) -> GraderSubject:
        return GraderSubject(grader=ExactGrader(ExactOptions(answer="42")), right="42", wrong="41")


class TestNumeric(GraderConformance):
    @pytest.fixture
    def subject(self) -> GraderSubject:
        return GraderSubject(grader=NumericGrader(NumericOptions(answer=42)), right="= 42", wrong="= 41")


class TestCommand(GraderConformance):
    @pytest.fixture
    def subject(self) -> GraderSubject:
        return GraderSubject(grader=CommandGrader(CommandOptions(command="true")), right=None, wrong=None)


@pytest.mark.asyncio(loop_scope="module")
class TestMath(GraderConformance):
    @pytest.fixture
    def subject(self, grader_hosts: ZygoteHosts) -> GraderSubject:
        pytest.importorskip("math_verify")
        return GraderSubject(
            grader=MathGrader(grader_hosts, MathOptions(answer="1/2", timeout_s=5)), right="0.5", wrong="2"
        )


@pytest.mark.asyncio(loop_scope="module")
class TestPython(GraderConformance):
    @pytest.fixture
    def subject(self, plain_grader: Grader) -> GraderSubject:
        return GraderSubject(grader=plain_grader, right="42", wrong="41")
