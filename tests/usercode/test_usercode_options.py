from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict

from rollserve.errors import InvalidInput
from rollserve.usercode.options import parse_options


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    answer: str


def test_an_unknown_option_goes_before_the_missing_one_it_was_meant_for() -> None:
    with pytest.raises(InvalidInput, match="unknown option") as caught:
        parse_options(Options, {"anser": "4"}, field="grader.options")
    assert caught.value.field == "grader.options.anser"
    assert "answer" in (caught.value.hint or "")


def test_a_missing_option_is_named() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_options(Options, {}, field="grader.options")
    assert caught.value.field == "grader.options.answer"
