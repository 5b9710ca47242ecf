"""Evaluation runs: everything is handed over, failures are no zeros, two runs are compared task by task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollserve.errors import FailureKind, InvalidInput, NotFound
from rollserve.executor.base import StartAttempt
from rollserve.records.control import GroupRule
from rollserve.records.evaluation import Outcome
from rollserve.records.rollout import Failure
from rollserve.records.run import Run, RunSpec
from rollserve.rollouts.evaluation import Asked, by_task, compare, differences, evaluate, results
from rollserve.store.ops.outcomes import task_key
from rollserve.testing.fakes_server import FakeExecutor, ended
from rollserve.testing.server_room import MakeRoom, Room, a_task
from rollserve.wire import GroupBody

SPEC = RunSpec(policy="pol", purpose="evaluation")
Ends = Callable[[StartAttempt], dict[str, Any]]


def outcome(task: str, reward: float | None = None, ungraded: str | None = None, **more: Any) -> Outcome:
    why = ungraded if reward is None else None
    return Outcome(task_key=task, title=task, reward=reward, ungraded=why, **more)


def some(task: str, *rewards: float | None) -> list[Outcome]:
    return [outcome(task, reward, "agent") for reward in rewards]


def test_tasks_weigh_the_same_however_many_rollouts_they_have() -> None:
    found = evaluate("r", SPEC, [*some("a", 1, 1, 1, 1), *some("b", 0)], Asked())
    assert found.mean_reward.value == 0.5
    assert found.pass_at[1].value == 0.5
    assert (found.tasks, found.rollouts, found.graded) == (2, 5, 5)


def test_what_has_no_grade_is_counted_and_is_no_zero() -> None:
    outcomes = [*some("a", 1, None, None), outcome("a", ungraded="open"), *some("b", None)]
    found = evaluate("r", SPEC, outcomes, Asked(ks=(1, 2)))
    assert found.ungraded == {"agent": 3, "open": 1}
    assert (found.mean_reward.value, found.mean_reward.tasks, found.mean_reward.short) == (1.0, 1, 1)
    assert (found.pass_at[1].value, found.pass_at[1].short) == (1.0, 1)
    assert (found.pass_at[2].value, found.pass_at[2].tasks, found.pass_at[2].short) == (None, 0, 2)


def test_what_it_took_is_of_rollouts_that_have_ended() -> None:
    outcomes = [outcome("a", 1.0, turns=n, seconds=2.0 * n, sampled_tokens=10 * n) for n in range(1, 11)]
    found = evaluate("r", SPEC, [*outcomes, outcome("a", ungraded="open", turns=99)], Asked())
    assert found.turns is not None
    assert (found.turns.mean, found.turns.median, found.turns.p90, found.turns.total) == (5.5, 5.5, 10, 55)
    assert found.sampled_tokens is not None
    assert found.sampled_tokens.total == 550
    assert evaluate("r", SPEC, [], Asked()).turns is None


def test_tasks_are_listed_the_worst_first() -> None:
    found = results([*some("a", 1, 0), *some("b", None), *some("c", 0, 0)], Asked(ks=(2,)))
    assert [each.key for each in found] == ["c", "a", "b"]
    assert [each.pass_at for each in found] == [{2: 0.0}, {2: 1.0}, {}]
    assert (found[1].passed, found[1].graded, found[2].mean_reward) == (1, 2, None)


def test_two_runs_are_compared_on_what_both_have() -> None:
    ours = [*some("a", 1, 1), *some("b", 1, 0), *some("c", 0, 0), *some("only ours", 1), *some("x", None)]
    theirs = [*some("a", 0, 0), *some("b", 1, 0), *some("c", 1, 0), *some("only theirs", 1), *some("x", 1)]
    found = compare("o", ours, "t", theirs, Asked(ks=(1, 2)))
    assert (found.tasks, found.wins, found.ties, found.losses) == (4, 1, 1, 1)
    assert found.mean_reward.value == pytest.approx((1 + 0 - 0.5) / 3)
    assert found.pass_at[2].value == pytest.approx((1 + 0 - 1) / 3)
    assert [each.title for each in found.not_graded] == ["x"]
    assert [each.title for each in found.ours.only_here] == ["only ours"]
    assert [each.title for each in found.theirs.only_here] == ["only theirs"]
    assert (found.ours.ungraded, found.theirs.ungraded) == (1, 0)
    listed = differences(ours, theirs)
    assert [(each.key, each.difference) for each in listed] == [
        ("c", -0.5),
        ("b", 0.0),
        ("a", 1.0),
        ("x", None),
    ]


def test_pairing_takes_the_hardness_of_tasks_out() -> None:
    ours = [one for n in range(40) for one in some(f"t{n}", float(n % 2), float(n % 2), float(n > 30))]
    theirs = [one for n in range(40) for one in some(f"t{n}", float(n % 2), float(n % 2), 0.0)]
    paired = compare("o", ours, "t", theirs, Asked()).mean_reward
    alone = evaluate("o", SPEC, ours, Asked()).mean_reward
    assert paired.low is not None
    assert paired.high is not None
    assert alone.low is not None
    assert alone.high is not None
    assert paired.low > 0
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)


def test_the_same_task_in_several_groups_is_one() -> None:
    assert by_task([*some("a", 1), *some("b", 0), *some("a", 0)])["a"].rewards == [1, 0]


def test_a_task_is_what_is_to_be_done_and_how_it_is_judged() -> None:
    task = a_task().model_dump(mode="json")
    how: dict[str, Any] = {"tools": [], "metadata": {"a": 1}, "limits": {"run_s": 1}, "agent": {}}
    what: dict[str, Any] = {"instruction": "other", "image": "x", "files": {"a": "b"}, "grader": {}}
    what["pictures"] = [{"url": "https://a.example/b.png"}]
    assert all(task_key(task | {name: other}) == task_key(task) for name, other in how.items())
    assert all(task_key(task | {name: other}) != task_key(task) for name, other in what.items())


# -- with a server


def ends(endings: Iterator[dict[str, Any]]) -> FakeExecutor:
    def play(executor: FakeExecutor, _: str, start: StartAttempt) -> None:
        executor.end(start.attempt_id, ended(start, **next(endings)))

    return FakeExecutor(play=play)


async def a_run(room: Room, tasks: list[str], rollouts: int = 2, **settings: Any) -> Run:
    run = await room.run(purpose="evaluation", **settings)
    bodies = [GroupBody(task=a_task(instruction=text), num_rollouts=rollouts) for text in tasks]
    await room.core.groups.submit(run.id, bodies, None)

    async def over() -> bool:
        return (await room.core.runs.counts(run.id))["groups_finished"] == len(tasks)

    await room.until(over)
    return run


async def test_a_run_is_evaluated_from_what_the_store_has(make_room: MakeRoom) -> None:
    crash = Failure(kind=FailureKind.AGENT, code="crash", message="x")
    endings: list[dict[str, Any]] = [{"reward": 1.0}, {"reward": 0.0}, {"failure": crash}, {"reward": 0.0}]
    async with make_room(ends(iter([*endings, {"reward": 1.0}, {"reward": 1.0}]))) as room:
        run = await a_run(room, ["first\nline", "second"], 2)
        found = await room.core.evaluations.evaluate(run.id, Asked(ks=(1, 2)))
        assert (found.tasks, found.rollouts, found.graded) == (2, 4, 3)
        assert found.ungraded == {"agent": 1}
        assert found.purpose == "evaluation"
        names = {each.title for each in await room.core.evaluations.results(run.id, Asked())}
        assert names == {"first", "second"}
        other = await a_run(room, ["second"], 2)
        compared = await room.core.evaluations.compare(other.id, run.id, Asked())
        assert (compared.tasks, compared.wins) == (1, 1)
        assert [each.title for each in compared.theirs.only_here] == ["first"]
        [difference] = await room.core.evaluations.differences(other.id, run.id)
        assert difference.ours == 1.0


async def test_more_groups_than_a_page_are_all_counted(make_room: MakeRoom) -> None:
    def forever() -> Iterator[dict[str, Any]]:
        while True:
            yield {"reward": 1.0}

    async with make_room(ends(forever())) as room:
        run = await a_run(room, [f"task {n}" for n in range(501)], 1)
        assert (await room.core.evaluations.evaluate(run.id, Asked())).tasks == 501


async def test_runs_that_are_not_there_or_the_same_are_named(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor()) as room:
        run = await room.run(purpose="evaluation")
        assert (await room.core.evaluations.evaluate(run.id, Asked())).mean_reward.value is None
        with pytest.raises(NotFound):
            await room.core.evaluations.evaluate("run_none", Asked())
        with pytest.raises(InvalidInput) as caught:
            await room.core.evaluations.compare(run.id, run.id, Asked())
        assert caught.value.field == "other"


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"min_usable": 1}, "min_usable"),
        ({"oversample": 1}, "oversample"),
        ({"deadline_s": 5}, "deadline_s"),
        ({"stragglers": "cancel", "min_usable": 1}, "min_usable"),
    ],
)
async def test_an_evaluation_cuts_no_rollout_short(
    make_room: MakeRoom, rule: dict[str, Any], field: str
) -> None:
    async with make_room(FakeExecutor()) as room:
        with pytest.raises(InvalidInput) as caught:
            await room.run(purpose="evaluation", groups=rule)
        assert caught.value.field == f"groups.{field}"
        run = await room.run(purpose="evaluation")
        with pytest.raises(InvalidInput) as caught:
            await room.submit(run, rollouts=4, rule=GroupRule.model_validate(rule))
        assert caught.value.field == f"groups.0.rule.{field}"
