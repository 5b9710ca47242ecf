"""What a prefix is worth, and how long a call waits for it: the rule alone."""

from __future__ import annotations

import pytest

from rollserve.backend.base import Generation, Usage
from rollserve.backend.homing import MOST_S, Pace, Patience, Prefix, read, sampled, worth_s


def test_a_pace_counts_calls_by_their_tokens_and_forgets_old_ones() -> None:
    pace = Pace()
    assert pace.token_s is None
    pace.add(3.0, 1)
    pace.add(7.0, 99)
    assert pace.token_s == pytest.approx(0.1, rel=0.02)
    for _ in range(200):
        pace.add(2.0, 100)
    assert pace.token_s == pytest.approx(0.02, rel=0.01)


def test_calls_without_tokens_say_nothing_of_a_pace() -> None:
    pace = Pace()
    pace.add(3.0, 0)
    assert pace.token_s is None


def test_a_prefix_is_of_one_salt_and_no_longer_than_the_prompt() -> None:
    prefix = Prefix()
    assert prefix.of(100, "1") == 0
    prefix.add(80, "1")
    prefix.add(30, "1")
    assert prefix.of(100, "1") == 80
    assert prefix.of(50, "1") == 50
    assert prefix.of(None, "1") == 80
    assert prefix.of(100, "2") == 0, "it was filled under other weights"
    prefix.add(30, "2")
    assert prefix.of(100, "2") == 30


def test_what_it_is_worth_grows_with_the_prefix_and_the_pace_and_is_bounded() -> None:
    assert worth_s(1000, 0.02, 0.1) == pytest.approx(2.0)
    assert worth_s(1000, 0.02, 0.0) == 0
    assert worth_s(1000, None, 0.1) == 0
    assert worth_s(0, 0.02, 0.1) == 0
    assert worth_s(10**6, 0.02, 0.1) == MOST_S


def test_patience_counts_from_the_first_place_that_was_let_go_by() -> None:
    patience = Patience()
    assert patience.ends_at(2.0, 100.0) == 102.0
    assert patience.ends_at(2.0, 101.0) == 102.0
    assert patience.ends_at(0.5, 101.0) == 100.5, "another place elsewhere, where less is lost"
    assert Patience().ends_at(0.0, 100.0) == 100.0


def test_what_was_read_and_sampled_is_the_engines_word_where_there_are_no_ids() -> None:
    ids = Generation(token_ids=[1, 2], logprobs=[0.0, 0.0], finish_reason="stop", prompt_ids=[5, 6, 7])
    assert (read(ids), sampled(ids)) == (3, 2)
    text = Generation(
        token_ids=[], logprobs=[], finish_reason="stop", usage=Usage(prompt_tokens=9, sampled_tokens=4)
    )
    assert (read(text), sampled(text)) == (9, 4)
    bare = Generation(token_ids=[], logprobs=[], finish_reason="stop")
    assert (read(bare), sampled(bare)) == (0, 0)
