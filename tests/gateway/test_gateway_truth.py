"""What makes a call untrainable, and which versions its tokens have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.backend.base import GenerateRequest, Generation, LabelSpan
from rollserve.gateway.truth import inexact, version_spans
from rollserve.records.call import Message, SamplingParams, VersionSpan
from rollserve.records.policy import BackendInfo

from .conftest import World

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


USER = Message(role="user", content="hi")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"prompt_ids": [1, 2]}, "backend_ids"),
        ({"logprobs": [-1.0]}, "logprobs"),
        ({"logprobs": [-1.0, float("nan")]}, "logprobs"),
        ({"logprobs": [-1.0, float("-inf")]}, "logprobs"),
    ],
)
async def test_what_cant_be_trained_says_why(world: World, changes: dict[str, Any], cause: str) -> None:
    session = await world.open()
    generation = Generation(token_ids=world.ids("x"), logprobs=[-0.1, -0.1], finish_reason="stop")
    assert len(generation.token_ids) == 2
    world.pool.script = lambda request: msgspec.structs.replace(generation, **changes)
    await session.model.chat([USER])
    assert world.segments[0].calls[0].inexact == cause
    assert session.counts["inexact"] == 1


async def test_ids_that_the_backend_echoes_are_exact(world: World) -> None:
    session = await world.open()
    world.pool.script = lambda request: world.generation("ok", prompt_ids=list(request.token_ids))
    await session.model.chat([USER])
    assert world.segments[0].calls[0].inexact is None


@pytest.mark.parametrize(
    ("mode", "sampling", "cause"),
    [
        ("raw", {}, None),
        ("unknown", {}, None),
        ("raw", {"temperature": 0.7}, "logprobs_mode"),
        ("unknown", {"top_p": 0.9}, "logprobs_mode"),
        ("raw", {"top_k": 20}, "logprobs_mode"),
        ("processed", {"temperature": 0.7, "top_k": 20}, None),
    ],
)
async def test_logprobs_must_be_of_the_sampled_distribution(
    world: World, mode: str, sampling: dict[str, Any], cause: str | None
) -> None:
    world.pool.info = BackendInfo(engine="x", models=["tiny"], logprobs_mode=mode)
    session = await world.open(run={"sampling": sampling})
    await session.model.chat([USER])
    call = world.segments[0].calls[0]
    assert (call.inexact, call.logprobs_mode) == (cause, mode)


async def test_versions_come_from_the_policys_labels(world: World) -> None:
    world.view(version=5, labels={"step-4": 4, "step-5": 5})
    spans = (LabelSpan(0, 1, "step-4"), LabelSpan(1, 2, "step-5"))
    world.pool.script = lambda request: world.generation("x", labels=spans)
    session = await world.open()
    await session.model.chat([USER])
    assert world.segments[0].calls[0].versions == (
        VersionSpan(0, 1, 4, 4),
        VersionSpan(1, 2, 5, 5, mixed=True),
    )


async def test_unlabelled_tokens_lie_between_start_and_end(world: World) -> None:
    def updated_meanwhile(request: GenerateRequest) -> Generation:
        world.view(version=2)
        return world.generation("x")

    world.view(version=1)
    world.pool.script = updated_meanwhile
    session = await world.open()
    await session.model.chat([USER])
    assert world.segments[0].calls[0].versions == (VersionSpan(0, 2, 1, 2, True, True),)


LABELS = st.sampled_from(["a", "b", "7", "-1", "x9", "1733012345678"])


@given(
    spans=st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12), LABELS), max_size=5),
    count=st.integers(0, 10),
)
def test_every_token_has_exactly_one_version(spans: list[tuple[int, int, str]], count: int) -> None:
    labels = [LabelSpan(*span) for span in spans]
    made = version_spans(labels, count, {"a": 3}, 1, 2)
    assert [i for span in made for i in range(span.start, span.end)] == list(range(count))
    for span in made:
        if span.inferred:
            assert (span.version, span.version_high) == (1, 2)
        else:
            assert span.version in (3, 7)


@pytest.mark.parametrize("wrong", [0.5, float("nan"), float("-inf"), float("inf")])
def test_a_logprob_of_no_probability_can_not_be_trained_on(wrong: float) -> None:
    sampling = SamplingParams(max_tokens=2)

    def judged(*logprobs: float) -> str | None:
        generation = Generation(token_ids=[5, 6], logprobs=list(logprobs), finish_reason="stop")
        return inexact(generation, [1], sampling, "processed")[0]

    assert judged(-0.5, 1e-6) is None
    assert judged(-0.5, wrong) == "logprobs"
