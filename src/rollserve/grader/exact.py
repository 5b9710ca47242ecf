"""``exact``: the answer is the expected text, or one of several."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rollserve.grader.base import Grade, Grading


class ExactOptions(BaseModel):
    """``strip`` ignores white space at both ends, ``ignore_case`` case."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answer: str | Annotated[list[str], Field(min_length=1)]
    strip: bool = True
    ignore_case: bool = False


class ExactGrader:
    """1.0 or 0.0. No answer is a wrong one."""

    carry = None

    def __init__(self, options: ExactOptions) -> None:
        self._options = options
        answers = [options.answer] if isinstance(options.answer, str) else options.answer
        self._expected = {self._plain(answer) for answer in answers}

    async def grade(self, grading: Grading) -> Grade:
        found = grading.answer is not None and self._plain(grading.answer) in self._expected
        return Grade(reward=1.0 if found else 0.0)

    def _plain(self, text: str) -> str:
        text = text.strip() if self._options.strip else text
        return text.casefold() if self._options.ignore_case else text
