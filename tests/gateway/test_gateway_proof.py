"""What is found wrong with samples, one thing at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from rollserve.gateway.proof import check_sample, check_together, stretches_of
from rollserve.gateway.samples import build_samples
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.call import Call, Message, ToolCall, VersionSpan, pack_floats, pack_ids
from rollserve.records.rollout import Rollout, RolloutState
from rollserve.records.run import RunSpec
from rollserve.records.sample import Sample
from rollserve.testing.fakes_server import a_call

ROLLOUT = Rollout(
    id="rol_1",
    group_id="grp_1",
    run_id="run_1",
    index=0,
    state=RolloutState.COMPLETED,
    reward=1.0,
    attempt_id="att_1",
)


def said(tiny: TextTokenizer, call_id: str, text: str, parent: str | None = None, **changes: Any) -> Call:
    ids = [*tiny.encode(text), tiny.eos_token_id or 0]
    base = a_call(call_id, parent, sampled=len(ids))
    return msgspec.structs.replace(
        base,
        prompt_ids=pack_ids(tiny.encode("hello there")),
        sampled_ids=pack_ids(ids),
        reply=Message(role="assistant", content=text),
        **changes,
    )


def samples_of(*calls: Call) -> tuple[list[Sample], dict[str, Call]]:
    made = build_samples(calls, rollout=ROLLOUT, run=RunSpec(policy="p"))
    return made, {call.id: call for call in calls}


def family(tiny: TextTokenizer) -> list[Call]:
    """Two that go on from the same one."""
    return [said(tiny, "a", "one"), said(tiny, "b", "two", "a"), said(tiny, "c", "x", "a")]


def wrong(sample: Sample, calls: dict[str, Call], tiny: TextTokenizer | None, version: int = 0) -> set[str]:
    return {found.check for found in check_sample(sample, calls, tiny, version).findings}


def test_a_good_sample_has_nothing_wrong(tiny: TextTokenizer) -> None:
    samples, calls = samples_of(*family(tiny))
    assert len(samples) == 2
    assert [wrong(sample, calls, tiny) for sample in samples] == [set(), set()]
    assert check_together(samples, calls) == []


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda s: {"logprobs": s.logprobs[:-1]}, "arrays"),
        (lambda s: {"extras": {"routed": np.zeros((3, 2))}}, "arrays"),
        (lambda s: {"ids": s.ids + 1}, "ids"),
        (lambda s: {"ids": s.ids[:0], "loss_mask": s.loss_mask[:0], "logprobs": s.logprobs[:0],
                    "versions": s.versions[:0], "rewards": s.rewards[:0]}, "ids"),
        (lambda s: {"call_ids": ("a", "gone")}, "ids"),
        (lambda s: {"loss_mask": np.ones_like(s.loss_mask)}, "mask"),
        (lambda s: {"exact": False}, "mask"),
        (lambda s: {"logprobs": s.logprobs * np.nan}, "logprobs"),
        (lambda s: {"logprobs": s.logprobs + 1}, "logprobs"),
        (lambda s: {"versions": s.versions * 0 - 1}, "versions"),
        (lambda s: {"versions": s.versions * 0}, "versions"),
        (lambda s: {"versions": np.where(s.versions >= 0, 7, -1).astype(np.int32)}, "versions"),
    ],
)  # fmt: skip
def test_each_fault_is_found(tiny: TextTokenizer, change: Any, check: str) -> None:
    (sample,), calls = samples_of(said(tiny, "a", "one"))
    assert check in wrong(dataclasses.replace(sample, **change(sample)), calls, tiny)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"versions": (VersionSpan(0, 1, 0, 0),)}, "spans"),
        ({"versions": (VersionSpan(1, 4, 0, 0),)}, "spans"),
        ({"versions": (VersionSpan(0, 4, 3, 1),)}, "spans"),
        ({"logprobs": pack_floats([-0.5])}, "logprobs"),
        ({"reply": Message(role="assistant", content="something else")}, "reply"),
        ({"reply": Message(role="assistant", content="one", reasoning="never thought")}, "reply"),
        (
            {"reply": Message(role="assistant", tool_calls=(ToolCall(id="1", name="rm", arguments="{}"),))},
            "reply",
        ),
    ],
)
def test_faults_of_a_call_are_found(tiny: TextTokenizer, change: Any, check: str) -> None:
    call = said(tiny, "a", "one")
    (sample,), calls = samples_of(call)
    calls["a"] = msgspec.structs.replace(call, **change)
    assert check in wrong(sample, calls, tiny)


def test_another_spelling_of_the_same_text_is_no_fault(tiny: TextTokenizer) -> None:
    """A model may sample letter by letter what the tokenizer would write as one token."""
    whole = tiny.encode("hello hello")
    letters = [token_id for letter in "hello hello" for token_id in tiny.encode(letter)]
    assert letters != whole
    call = msgspec.structs.replace(
        said(tiny, "a", "hello hello"),
        sampled_ids=pack_ids(letters),
        logprobs=pack_floats([-0.5] * len(letters)),
        versions=(VersionSpan(0, len(letters), 0, 0),),
    )
    (sample,), calls = samples_of(call)
    proof = check_sample(sample, calls, tiny, 0)
    assert (proof.findings, proof.respelled) == ([], 1)


def test_half_a_character_is_compared_by_its_bytes(tiny: TextTokenizer) -> None:
    half = tiny.encode("é")[:1]
    assert "\ufffd" in tiny.decode(half)
    call = msgspec.structs.replace(
        said(tiny, "a", ""),
        sampled_ids=pack_ids(half),
        logprobs=pack_floats([-0.5]),
        versions=(VersionSpan(0, 1, 0, 0),),
    )
    (sample,), calls = samples_of(call)
    assert check_sample(sample, calls, tiny, 0).findings == []


def test_text_that_does_not_give_the_tokens_back_is_found(tiny: TextTokenizer) -> None:
    class Lossy(TextTokenizer):
        def decode(self, token_ids: Any, *args: object, skip_special_tokens: bool = False) -> str:
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens).replace("e", "")

        def encode(self, text: str, *args: object, **kwargs: object) -> list[int]:
            return super().encode(f"{text}!")

    lossy = Lossy.__new__(Lossy)
    lossy.__dict__.update(tiny.__dict__)
    (sample,), calls = samples_of(said(tiny, "a", "one"))
    assert "round_trip" in wrong(sample, calls, lossy)


def test_without_a_tokenizer_ids_are_not_read(tiny: TextTokenizer) -> None:
    (sample,), calls = samples_of(
        msgspec.structs.replace(said(tiny, "a", "one"), reply=Message(role="assistant", content="no"))
    )
    assert wrong(sample, calls, None) == set()


def test_what_holds_of_all_samples_together(tiny: TextTokenizer) -> None:
    samples, calls = samples_of(*family(tiny))
    first, second = samples
    heavy = dataclasses.replace(first, weight=1.0)
    assert {found.check for found in check_together([heavy, second], calls)} == {"weights"}
    assert {found.check for found in check_together([second, first], calls)} == {"weights"}
    twice = dataclasses.replace(second, loss_mask=second.versions >= 0)
    (found,) = check_together([first, twice], calls)
    assert (found.check, found.detail) == ("mask", "call a: its tokens are trained 2 times")
    assert check_together([first, twice], calls, {"a"}) != []
    never = dataclasses.replace(first, loss_mask=np.zeros_like(first.loss_mask))
    assert {"call a: its tokens are trained 0 times"} <= {
        each.detail for each in check_together([never, second], calls)
    }
    assert check_together([never, second], calls, calls.keys() - second_trained(second, calls)) == []


def second_trained(sample: Sample, calls: Mapping[str, Call]) -> set[str]:
    """Calls whose tokens are trained there."""
    found = set()
    for stretch in stretches_of(sample, calls):
        if stretch.sampled and sample.loss_mask[stretch.start : stretch.start + len(stretch.ids)].any():
            found.add(stretch.call.id)
    return found
