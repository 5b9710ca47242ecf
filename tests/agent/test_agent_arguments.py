"""Arguments as models write them: read, or refused with a reason."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.agent.toolbox import decode_arguments


@given(st.text() | st.recursive(st.none() | st.floats() | st.text(), lambda x: st.lists(x)).map(json.dumps))
def test_no_arguments_crash_the_decoding(text: str) -> None:
    decoded = decode_arguments(text)
    assert isinstance(decoded, dict | str)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": NaN}', "not valid JSON"),
        ('{"a": 1', "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested too deeply"),
        ('{"a": "\ud800"}', "not valid JSON"),
        ("null", "must be a JSON object"),
        (" " * (5 << 20), "longer than"),
    ],
)
def test_what_is_wrong_with_arguments_is_said(text: str, says: str) -> None:
    assert says in decode_arguments(text)


def test_good_arguments_are_read() -> None:
    assert decode_arguments("") == {}
    assert decode_arguments(' {"a": 123456789012345678901234567890} ') == {
        "a": 123456789012345678901234567890
    }
