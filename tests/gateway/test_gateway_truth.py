"""Whether logprobs are those of the distribution that was sampled, by what the backend gives."""

from __future__ import annotations

from typing import Any

import pytest

from rollserve.backend.base import Generation, LabelSpan
from rollserve.gateway.truth import inexact, version_spans
from rollserve.records.call import SamplingParams

MADE = Generation(token_ids=[5, 2], logprobs=[-0.5, -0.25], finish_reason="stop", prompt_ids=[1])


@pytest.mark.parametrize(
    ("sampling", "exact_under"),
    [
        ({}, {"processed", "temperature", "raw", "unknown"}),
        ({"temperature": 0.7}, {"processed", "temperature"}),
        ({"temperature": 0.0}, {"processed"}),
        ({"top_p": 0.9}, {"processed"}),
        ({"top_k": 20}, {"processed"}),
        ({"temperature": 0.7, "top_k": 20}, {"processed"}),
    ],
)
def test_what_each_mode_is_exact_for(sampling: dict[str, Any], exact_under: set[str]) -> None:
    params = SamplingParams(**sampling)
    for mode in ("processed", "temperature", "raw", "unknown"):
        cause, _ = inexact(MADE, [1], params, mode)
        assert cause == (None if mode in exact_under else "logprobs_mode"), mode


def test_tokens_on_a_cache_of_older_weights_are_marked_mixed() -> None:
    known = {"four": 4, "five": 5, "six": 6}

    def mixed(*labels: LabelSpan, low: int = 5, high: int = 5) -> list[bool]:
        return [span.mixed for span in version_spans(labels, 4, known, low, high)]

    assert mixed(LabelSpan(0, 4, "five")) == [False]
    assert mixed(LabelSpan(0, 2, "five"), LabelSpan(2, 4, "six")) == [False, True]
    assert mixed(LabelSpan(0, 4, "six")) == [True], "its cache is salted for version 5"
    assert mixed(LabelSpan(0, 4, "four")) == [False]
    assert mixed(low=5, high=6) == [True]
    assert mixed() == [False]
