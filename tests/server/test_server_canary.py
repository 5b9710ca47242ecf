"""What the canary concludes from scores: pure."""

from __future__ import annotations

from rollserve.records.update import Canary
from rollserve.rollouts.canary import Judgement, Scores, canary_ids, judge, judge_restored

OLD = [-1.0, -2.0, -3.0]
NEW = [-1.5, -2.5, -2.0]
SMALL_STEP = [-1.004, -2.004, -2.996]


def found(
    scores: Scores, figures: list[float] | None = None, previous: Canary | None = None, tolerance: float = 0.1
) -> Judgement:
    return judge(7, scores, figures=figures, previous=previous, tolerance=tolerance)


def at_six(expected: list[float] | None = None, **scores: list[float]) -> Canary:
    return Canary(version=6, verdict="verified", scores=scores, expected=expected)


def test_one_backend_without_figures_proves_nothing() -> None:
    judgement = found({"a": NEW})
    assert judgement.canary.verdict == "unverified"
    assert judgement.canary.detail == "one backend, and no figures from the trainer"
    assert not judgement.right
    assert not judgement.wrong


def test_one_backend_that_did_not_change_at_all_is_said_so() -> None:
    assert "did not change at all" in found({"a": OLD}, previous=at_six(a=OLD)).canary.detail


def test_backends_that_agree_verify_each_other() -> None:
    judgement = found({"a": NEW, "b": [value + 0.01 for value in NEW]})
    assert judgement.canary.verdict == "verified"
    assert judgement.right == {"a", "b"}


def test_the_odd_one_out_is_named() -> None:
    judgement = found({"a": NEW, "b": OLD, "c": NEW})
    assert judgement.canary.verdict == "failed"
    assert judgement.wrong == {"b": "canary at version 7: its logprobs are those of other weights"}
    assert judgement.right == {"a", "c"}


def test_two_that_disagree_can_only_be_told_by_figures() -> None:
    undecided = found({"a": NEW, "b": OLD})
    assert undecided.undecided
    assert "send the trainer's figures" in undecided.canary.detail
    told = found({"a": NEW, "b": OLD}, figures=NEW)
    assert list(told.wrong) == ["b"]
    assert not told.undecided


def test_of_two_the_one_that_has_not_moved_is_stale() -> None:
    judgement = found({"a": NEW, "b": OLD}, previous=at_six(a=OLD, b=OLD))
    assert judgement.wrong == {"b": "canary at version 7: it still serves the old weights"}
    assert not judgement.undecided


def test_a_step_far_below_the_tolerance_still_tells_who_did_not_follow() -> None:
    judgement = found({"a": SMALL_STEP, "b": OLD}, previous=at_six(a=OLD, b=OLD))
    assert list(judgement.wrong) == ["b"]
    assert judgement.canary.backends["b"].verdict == "unmoved"


def test_most_of_them_being_stale_does_not_help_them() -> None:
    scores = {"a": SMALL_STEP, "b": OLD, "c": OLD}
    assert list(found(scores, previous=at_six(a=OLD, b=OLD, c=OLD)).wrong) == ["b", "c"]


def test_one_backend_against_figures() -> None:
    assert found({"a": NEW}, figures=NEW).canary.verdict == "verified"
    assert list(found({"a": OLD}, figures=NEW).wrong) == ["a"]


def test_figures_that_moved_show_a_backend_that_did_not() -> None:
    """The trainer's numerics are a little off the engine's, by more than the step."""
    trainer_before = [value + 0.05 for value in OLD]
    trainer_now = [value + 0.05 for value in SMALL_STEP]
    previous = at_six(a=OLD, expected=trainer_before)
    assert list(found({"a": OLD}, figures=trainer_now, previous=previous).wrong) == ["a"]
    assert not found({"a": SMALL_STEP}, figures=trainer_now, previous=previous).wrong


def test_those_that_do_not_score_are_no_evidence() -> None:
    judgement = found({"a": NEW, "b": "it does not score"})
    assert judgement.canary.verdict == "unverified"
    assert judgement.canary.backends["b"].detail == "it does not score"
    assert found({"b": "it does not score"}).canary.detail == "no backend gives logprobs of a prompt"
    assert found({}).canary.verdict == "unverified"


def test_after_an_update_that_did_not_happen_each_is_held_to_its_past() -> None:
    previous = at_six(a=OLD, b=OLD, c=OLD)
    judgement = judge_restored(previous, {"a": OLD, "b": NEW, "c": "away", "d": OLD}, tolerance=0.1)
    assert judgement.canary.version == 6
    assert list(judgement.wrong) == ["b"]
    assert judgement.right == {"a"}
    assert judgement.canary.backends["d"].verdict == "unscored"
    assert judgement.canary.scores == previous.scores


def test_the_tokens_fit_any_vocabulary_and_context() -> None:
    ids = canary_ids(None)
    assert len(ids) == 32
    assert 3 <= min(ids) <= max(ids) < 256
    assert len(set(ids)) > 16
    assert len(canary_ids(16)) == 15
