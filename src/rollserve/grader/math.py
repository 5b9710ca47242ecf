"""``math``: the answer means the same as the expected one, by ``math-verify`` (extra ``math``).

Comparing expressions can take for ever, so it is done in a code host with a deadline.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from rollserve import installing
from rollserve.errors import GraderFailure, InvalidInput
from rollserve.grader.base import Grade, Grading
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeHosts, Role, Use

COMPARE = "rollserve.grader.math_compare:same"
OPERATION = "grader math"


class MathOptions(BaseModel):
    """``answer`` is the expected one, plain or in LaTeX; ``timeout_s`` the comparison's deadline."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answer: Annotated[str, Field(min_length=1, max_length=100_000)]
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0


def check_installed(module: str = "math_verify") -> None:
    """Raise ``InvalidInput`` saying how to get the extra when it is missing."""
    if find_spec(module) is None:
        raise InvalidInput(
            "the grader 'math' needs math-verify, which is not installed",
            field="grader.name",
            hint=f"{installing.extra('math')}, for the server and its workers",
        )


class MathGrader:
    """1.0 or 0.0. No answer is a wrong one; an expected answer that can't be read is a failure."""

    carry = None

    def __init__(self, hosts: CodeHosts, options: MathOptions) -> None:
        self._hosts = hosts
        self._options = options

    async def grade(self, grading: Grading) -> Grade:
        if not (grading.answer or "").strip():
            return Grade(reward=0.0)
        await self._hosts.describe(COMPARE, Role.ANY, field="grader.name")  # preloads it, once
        words: dict[str, Any] = {"expected": self._options.answer, "answer": grading.answer}
        order = params.RunFunction(path=COMPARE, arguments_json=msgspec.json.encode(words))
        try:
            async with self._hosts.open(Use.LEAF, handlers={}, log=grading.log, pause=grading.pause) as host:
                result = await host.call("function", order, params.Json, timeout_s=self._options.timeout_s)
        except CodeFault as fault:
            raise GraderFailure(fault.report, operation=OPERATION) from fault
        return Grade(reward=1.0 if msgspec.json.decode(result.data, type=bool) else 0.0)
