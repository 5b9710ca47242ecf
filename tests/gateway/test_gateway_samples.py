from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.gateway.samples import build_samples, left_out, token_report
from rollserve.records.call import Call, Message, SamplingParams, VersionSpan, pack_floats, pack_ids
from rollserve.records.rollout import Rollout
from rollserve.records.run import RouteSpec, RunSpec
from rollserve.records.sample import Sample

RUN = RunSpec(policy="p")


def call(name: str, parent: str | None, prompt: list[int], sampled: list[int], **changes: Any) -> Call:
    fields: dict[str, Any] = {
        "id": name,
        "parent": parent,
        "messages": (Message(role="user", content=f"q {name}"),),
        "prompt_ids": pack_ids(prompt),
        "sampled_ids": pack_ids(sampled),
        "logprobs": pack_floats([-float(i) for i in sampled]),
        "versions": (VersionSpan(0, len(sampled), 3, 3),) if sampled else (),
        "reply": Message(role="assistant", content=f"a {name}"),
        "finish_reason": "stop",
        "sampling": SamplingParams(),
    }
    return Call(**{**fields, **changes})


def rollout(reward: float | None = 1.0) -> Rollout:
    return Rollout(id="r", group_id="g", run_id="run", index=2, reward=reward)


def samples(
    calls: list[Call], *, reward: float | None = 1.0, run: RunSpec = RUN, **more: Any
) -> list[Sample]:
    return build_samples(calls, rollout=rollout(reward), run=run, **more)


def test_one_path() -> None:
    (sample,) = samples([call("a", None, [1, 2], [3, 4]), call("b", "a", [5], [6])])
    assert sample.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.logprobs.tolist() == [0, 0, -3, -4, 0, -6]
    assert sample.versions.tolist() == [-1, -1, 3, 3, -1, 3]
    assert sample.rewards.tolist() == [0, 0, 0, 0, 0, 1]
    assert (sample.weight, sample.index, sample.count, sample.rollout_index) == (1.0, 0, 1, 2)
    assert (sample.exact, sample.mixed_versions, sample.inferred_versions) == (True, False, False)
    assert sample.call_ids == ("a", "b")
    assert {a.dtype.str for a in (sample.ids, sample.versions)} == {"<i4"}


def test_a_shared_prefix_is_trained_in_the_first_path_only() -> None:
    forked = [call("a", None, [1], [2]), call("b", "a", [3], [4]), call("c", "a", [3], [5])]
    one, two = samples(forked)
    assert one.loss_mask.tolist() == [False, True, False, True]
    assert two.loss_mask.tolist() == [False, False, False, True]
    assert (one.weight, two.weight, two.index, two.count) == (0.5, 0.5, 1, 2)
    assert [s.rewards.tolist() for s in (one, two)] == [[0, 0, 0, 1]] * 2


def test_per_call_rewards_stand_at_the_end_of_their_call() -> None:
    calls = [call("a", None, [1], [2, 2]), call("b", "a", [3], [4])]
    (sample,) = samples(calls, call_rewards={"a": 0.25})
    assert sample.rewards.tolist() == [0, 0, 0.25, 0, 0]


def test_no_reward_is_no_reward() -> None:
    (sample,) = samples([call("a", None, [1], [2])], reward=None, call_rewards={"a": 1.0})
    assert sample.reward is None
    assert not sample.rewards.any()


def test_what_sampled_nothing_ends_no_path() -> None:
    calls = [call("a", None, [1], [2]), call("b", "a", [3], [], finish_reason="abort")]
    (sample,) = samples(calls)
    assert sample.call_ids == ("a",)
    assert samples([calls[1]]) == []
    assert samples([]) == []


def test_an_aborted_call_counts_for_what_it_sampled() -> None:
    (sample,) = samples([call("a", None, [1], [2, 3], finish_reason="abort")])
    assert sample.loss_mask.sum() == 2


def test_an_empty_call_inside_a_path_is_context() -> None:
    calls = [call("a", None, [1], [], finish_reason="abort"), call("b", "a", [9, 3], [4])]
    (sample,) = samples(calls)
    assert sample.ids.tolist() == [1, 9, 3, 4]
    assert sample.loss_mask.tolist() == [False, False, False, True]


def test_inexact_paths_are_left_out_and_their_prefix_is_trained_elsewhere() -> None:
    calls = [
        call("a", None, [1], [2]),
        call("b", "a", [3], [4], inexact="backend_ids"),
        call("c", "a", [3], [5]),
    ]
    (sample,) = samples(calls)
    assert sample.call_ids == ("a", "c")
    assert sample.loss_mask.tolist() == [False, True, False, True]
    assert sample.weight == 1.0


def test_what_comes_before_an_inexact_call_is_trained() -> None:
    calls = [
        call("a", None, [1], [2]),
        call("b", "a", [3], [4], inexact="logprobs"),
        call("c", "b", [5], [6]),
    ]
    (sample,) = samples(calls)
    assert (sample.call_ids, sample.ids.tolist()) == (("a",), [1, 2])
    assert sample.rewards.tolist() == [0, 1]
    assert left_out(calls, RUN) == {"b": "logprobs", "c": "logprobs"}
    exact, text = samples(calls, run=RunSpec(policy="p", on_inexact="text"))
    assert (exact.call_ids, text.call_ids) == (("a",), ("a", "b", "c"))
    assert (exact.loss_mask.sum(), text.loss_mask.sum()) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"label": "side"}, "label_side"),
        ({"policy": "other"}, "route_other"),  # before there were routes
        ({"policy": "other", "route": "judge"}, "route_judge"),
        ({"route": "judge"}, "route_judge"),
    ],
)
def test_what_the_run_leaves_out_is_counted(changes: dict[str, Any], reason: str) -> None:
    calls = [call("a", None, [1], [2, 3]), call("t", None, [4], [5, 6, 7], **changes)]
    (sample,) = made = samples(calls)
    assert sample.call_ids == ("a",)
    report = token_report(calls, made, RUN)
    assert (report.sampled, report.trained, report.left_out) == (5, 2, {reason: 3})
    assert (report.calls, report.sequences, report.tokens) == (2, 1, 3)


def test_a_route_that_is_trained_has_samples_of_its_own_policy() -> None:
    routes = {"pupil": RouteSpec(policy="other", train=True), "self": RouteSpec(policy="p", train=True)}
    run = RunSpec(policy="p", routes=routes)
    calls = [
        call("a", None, [1], [2, 3]),
        call("b", None, [4], [5, 6, 7], policy="other", route="pupil"),
        call("c", None, [8], [9], route="self"),
        call("d", None, [8], [9], policy="other", route="pupil", label="side"),
    ]
    made = samples(calls, run=run)
    assert [(sample.policy, sample.call_ids) for sample in made] == [
        ("", ("a",)),
        ("other", ("b",)),
        ("", ("c",)),
    ]
    assert [sample.weight for sample in made] == [0.5, 1.0, 0.5]
    report = token_report(calls, made, run)
    assert (report.trained, report.left_out) == (6, {"label_side": 1})


def test_the_run_says_which_labels_are_trained() -> None:
    calls = [
        call("a", None, [1], [2]),
        call("b", "a", [3], [4], label="fork"),
        call("c", "b", [5], [6], label="fork"),
        call("d", "b", [7], [8]),
    ]
    run = RunSpec(policy="p", train_labels=("continuation",))
    (sample,) = made = samples(calls, run=run)
    assert sample.call_ids == ("a", "b", "d")
    assert sample.ids[sample.loss_mask].tolist() == [2, 8]
    report = token_report(calls, made, run)
    assert report.left_out == {"label_fork": 2}
    assert report.by_label["fork"].trained == 0
    assert report.by_label["continuation"].trained == report.trained == 2


def test_a_title_that_came_first_is_left_out_in_the_end() -> None:
    system = Message(role="system", content="s")
    calls = [
        call("t", None, [1], [2]),
        call("a", None, [3], [4], messages=(system,), tools=({"type": "function"},)),
    ]
    (sample,) = samples(calls)
    assert sample.call_ids == ("a",)


def test_calls_of_earlier_versions_are_continuations() -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(call("a", None, [1], [2])))
    assert {"label", "origin", "drift", "policy", "route"}.isdisjoint(fields)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Call)
    assert (read.label, read.origin, read.drift, read.policy) == ("continuation", None, (), "")
    old = RunSpec.model_validate_json('{"policy": "p"}')
    assert (old.rewrites, old.routes, "side" in old.train_labels) == ("exact", {}, False)


def test_inexact_paths_as_text() -> None:
    run = RunSpec(policy="p", on_inexact="text")
    calls = [call("a", None, [1], [2, 3], inexact="logprobs", logprobs=pack_floats([-1.0]))]
    (sample,) = samples(calls, run=run)
    assert (sample.exact, sample.cause) == (False, "logprobs")
    assert not sample.loss_mask.any()
    assert sample.text == "[user]\nq a\n\n[assistant]\na a"


def test_constrained_calls_are_context_unless_their_mask_is_kept() -> None:
    (bare,) = samples([call("a", None, [1], [2, 3], constrained=True)])
    assert not bare.loss_mask.any()
    extras = {"sampling_mask": b"\x01\x02"}
    (kept,) = samples([call("a", None, [1], [2, 3], constrained=True, extras=extras)])
    assert kept.loss_mask.sum() == 2
    assert kept.extras["sampling_mask"].tolist() == [[0], [1], [2]]


def test_versions_that_are_mixed_or_inferred_are_marked() -> None:
    spans = (VersionSpan(0, 1, 2, 2), VersionSpan(1, 2, 3, 4, True, True))
    (sample,) = samples([call("a", None, [1], [2, 3], versions=spans)])
    assert sample.versions.tolist() == [-1, 2, 3]
    assert sample.mixed_versions
    assert sample.inferred_versions
    assert sample.oldest_version == 2


@pytest.mark.parametrize("data", [b"\x01\x02\x03", b""])
def test_extras_that_have_no_row_a_token_stay_with_their_calls(data: bytes) -> None:
    (sample,) = samples([call("a", None, [1], [2, 3], extras={"experts": data})])
    assert sample.extras == {}


def test_extras_that_only_some_calls_have_stay_with_their_calls() -> None:
    calls = [call("a", None, [1], [2], extras={"experts": b"\x01"}), call("b", "a", [3], [4])]
    (sample,) = samples(calls)
    assert sample.extras == {}


@st.composite
def trees(draw: st.DrawFn) -> list[Call]:
    calls: list[Call] = []
    token = iter(range(1, 10_000))
    for index in range(draw(st.integers(0, 14))):
        parent = draw(st.sampled_from([None, *(c.id for c in calls)]))
        prompt = [0] * draw(st.integers(1, 3))
        sampled = [next(token) for _ in range(draw(st.integers(0, 3)))]
        inexact = draw(st.sampled_from([None, None, None, "backend_ids"]))
        calls.append(call(f"c{index}", parent, prompt, sampled, inexact=inexact))
    return calls


@given(calls=trees(), keep_inexact=st.booleans())
def test_each_sampled_token_is_trained_once(calls: list[Call], keep_inexact: bool) -> None:
    if not keep_inexact:
        calls = [c for c in calls if c.inexact is None and (c.parent is None or _exact(calls, c))]
    made = samples(calls)
    trained = Counter(int(i) for s in made for i in s.ids[s.loss_mask])
    assert all(count == 1 for count in trained.values())
    if not keep_inexact:
        assert set(trained) == {int(i) for c in calls for i in np.frombuffer(c.sampled_ids, "<i4")}
        inner = {c.parent for c in calls if c.sampled_ids}
        assert len(made) <= sum(1 for c in calls if c.sampled_ids)
        assert all(s.call_ids[-1] not in inner for s in made)
    assert sum(s.weight for s in made) == pytest.approx(1.0 if made else 0.0)
    for s in made:
        assert (s.versions >= 0).sum() == (s.ids > 0).sum()
        assert not s.logprobs[~(s.versions >= 0)].any()


def _exact(calls: list[Call], leaf: Call) -> bool:
    by_id = {c.id: c for c in calls}
    at: Call | None = leaf
    while at is not None:
        if at.inexact is not None:
            return False
        at = by_id[at.parent] if at.parent else None
    return True
