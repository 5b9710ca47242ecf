from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.dialect.marks import mark, marked
from rollserve.dialect.responses_ids import call_of_item, item_id


@given(st.text(min_size=1, max_size=60))
def test_a_mark_leads_back_to_its_call(call_id: str) -> None:
    assert marked(mark(call_id)) == call_id
    plain = base64.b64decode(mark(call_id), validate=True)
    assert marked(base64.urlsafe_b64encode(plain).decode().rstrip("=")) == call_id


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "gAAAAABo",
        "skip_thought_signature_validator",
        mark(""),
        mark("a")[:-3],
        base64.b64encode(b"other:mc_1").decode(),
        base64.b64encode(b"rollserve:\xff").decode(),
        "é",
        "A" * 100_000,
    ],
)
def test_what_is_not_ours_leads_nowhere(value: str | None) -> None:
    assert marked(value) is None


@given(st.text(max_size=200))
def test_arbitrary_values_are_no_error(value: str) -> None:
    marked(value)
    call_of_item(value)


@given(st.text(min_size=1, max_size=60).filter(lambda text: "_rv_" not in text), st.integers(0, 99))
def test_an_items_id_leads_back_to_its_call(call_id: str, index: int) -> None:
    assert call_of_item(item_id("msg", call_id, index)) == call_id


@pytest.mark.parametrize(
    "value", [None, "", "msg_67c9fdcecf48", "rs_rv_", "fc_rv_x", "fc_rv_x_y", "fc_rv__1"]
)
def test_another_providers_ids_lead_nowhere(value: str | None) -> None:
    assert call_of_item(value) is None
