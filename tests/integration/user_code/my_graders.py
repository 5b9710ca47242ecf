"""Graders of a user's that ask a model: in a coroutine, and in a plain function."""

from __future__ import annotations

import re

from rollserve.grader.base import Grade, Grading
from rollserve.records.call import Message

QUESTION = "Rate from 0 to 1.\nanswer: {answer}"


def mark_in(text: str) -> float:
    """The last number that the judge said."""
    return float(re.findall(r"\d+\.\d+", text)[-1])


async def judged(grading: Grading) -> Grade:
    assert grading.model is not None
    question = Message(role="user", content=QUESTION.format(answer=grading.answer))
    reply = await grading.model.chat([question], model="judge")
    said = reply.message.content or ""
    return Grade(reward=mark_in(said), detail={"said": said})


def lenient(grading: Grading) -> float:
    """Takes a judge that fails for a wrong answer, as no grader should."""
    assert grading.model is not None
    question = Message(role="user", content=QUESTION.format(answer=grading.answer))
    try:
        return mark_in(grading.model.chat([question], model="judge").message.content or "")  # type: ignore[attr-defined]
    except Exception:
        return 0.0
