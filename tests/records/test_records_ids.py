"""Ids in all their forms."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.records.call import pack_ids, unpack_ids
from rollserve.records.ids import Ids, with_ids

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=8)


def agree(made: Ids, ids: list[int]) -> None:
    assert (len(made), bool(made)) == (len(ids), bool(ids))
    assert made.packed == pack_ids(ids)
    assert json.loads(b"[%b]" % made.text) == ids
    assert made.list == list(made) == made[:] == ids
    assert made == ids
    assert made == Ids(ids)
    assert made != [*ids, 1]


@given(IDS)
def test_each_form_is_that_of_the_same_ids(ids: list[int]) -> None:
    agree(Ids(ids), ids)
    agree(Ids(packed=pack_ids(ids)), ids)
    agree(Ids(ids).made(), ids)
    agree(Ids(packed=pack_ids(ids), text=Ids(ids).text), ids)


@given(st.lists(IDS, max_size=4))
def test_joined_are_one_after_another(parts: list[list[int]]) -> None:
    whole = [token_id for part in parts for token_id in part]
    made = Ids.joined(*map(Ids, parts))
    agree(made, whole)
    assert unpack_ids(made.packed).tolist() == whole


def test_they_have_no_hash() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Ids([1]))


@given(IDS)
def test_a_document_gets_them_as_one_more_member(ids: list[int]) -> None:
    for given_as in (ids, Ids(ids)):
        assert json.loads(with_ids(b'{"a":1}', b"ids", given_as)) == {"a": 1, "ids": ids}
