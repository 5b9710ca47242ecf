"""``numeric``: the last number in the answer is the expected one, within a tolerance."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rollserve.grader.base import Grade, Grading

ANSWER_CHARS = 100_000
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+−])?"  # a sign, where it is none between two terms
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,4})?"
)
Finite = Annotated[float, Field(allow_inf_nan=False)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class NumericOptions(BaseModel):
    """Right is ``|found - answer| <= max(abs_tol, rel_tol * |answer|)``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answer: Finite
    abs_tol: Tolerance = 1e-6
    rel_tol: Tolerance = 1e-9


class NumericGrader:
    """1.0 or 0.0. No number is a wrong one."""

    carry = None

    def __init__(self, options: NumericOptions) -> None:
        self._options = options

    async def grade(self, grading: Grading) -> Grade:
        options, found = self._options, last_number(grading.answer or "")
        if found is None:
            return Grade(reward=0.0)
        allowed = max(options.abs_tol, options.rel_tol * abs(options.answer))
        right = abs(found - options.answer) <= allowed
        return Grade(reward=1.0 if right else 0.0, detail={"found": found})


def last_number(text: str) -> float | None:
    """The last finite number written in ``text`` (its last ``ANSWER_CHARS``): ``1,234.5``, ``-3e-2``,
    ``.5``."""
    found = None
    for match in _NUMBER.finditer(text[-ANSWER_CHARS:]):
        value = float(match[0].replace(",", "").replace("−", "-"))
        found = value if math.isfinite(value) else found
    return found
