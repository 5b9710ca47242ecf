"""The part of the ``math`` grader that runs in a code host."""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

ANSWER_CHARS = 16_384
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_MARKED = ("$", "\\boxed", "\\[", "\\(")


def same(*, expected: str, answer: str) -> bool:
    """Whether two answers mean the same. math-verify's own time-outs return "no" when they strike, so
    they are off (and what it logs): the host's deadline holds instead."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    gold = _parse(expected, strict=True)
    if not gold:
        raise ValueError(f"the expected answer {expected!r} can't be read")
    found = _parse(answer[-ANSWER_CHARS:], strict=False)  # what can't be read is wrong
    return bool(found) and bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def __preload__() -> None:
    """In the zygote: the parser's tables take 0.2 s to build, which every fork would pay again."""
    same(expected="\\frac{1}{2}", answer="x^2+0.5")


def _parse(text: str, *, strict: bool) -> list[Any]:
    """A bare formula is marked as one: of an unmarked text, math-verify takes the last number. A
    ``strict`` reading raises where the text makes the parser stumble; otherwise nothing is found."""
    bare = not any(mark in text for mark in _MARKED) and not _WORD.search(_COMMAND.sub("", text))
    forms = (f"${text}$", text) if bare else (text, f"${text}$")
    for form in forms:
        if found := parse(form, parsing_timeout=None, raise_on_error=strict):
            return list(found)
    return []
