"""Runs with routes: what is refused, and where their calls show."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from rollserve.errors import InvalidInput, UnknownName
from rollserve.records.call import Drift
from rollserve.records.policy import PolicySpec
from rollserve.records.rollout import RolloutState
from rollserve.records.run import RouteSpec, RunSpec
from rollserve.rollouts.delivery import Wanted
from rollserve.rollouts.verify import Criteria
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, a_call, ended
from rollserve.testing.server_room import MakeRoom, Room


@pytest.fixture
async def room(make_room: MakeRoom) -> AsyncIterator[Room]:
    async with make_room(FakeExecutor(capacity=8), payloads=FakePayloads()) as room:
        await room.core.policies.create(PolicySpec(name="pol", model="m", tokenizer="tiny"))
        await room.core.policies.create(PolicySpec(name="other", model="o", tokenizer="tiny"))
        await room.core.policies.create(PolicySpec(name="words", model="w", interface="text"))
        yield room


ASIDE = RouteSpec(policy="other", side_calls=True)


@pytest.mark.parametrize(
    ("routes", "field", "says"),
    [
        ({"judge": RouteSpec(policy="othr")}, "routes.judge.policy", "did you mean 'other'"),
        ({"pol": RouteSpec(policy="other")}, "routes.pol", "own policy"),
        ({"m": RouteSpec(policy="other")}, "routes.m", "own policy"),
        ({"t": RouteSpec(policy="words", train=True)}, "routes.t.train", "no tokens"),
        ({"a": ASIDE, "b": ASIDE}, "routes.b.side_calls", "'a' answers side calls"),
        (
            {"g": RouteSpec(policy="other", side_calls=True, stages=("grade",))},
            "routes.g.side_calls",
            "may not ask",
        ),
    ],
)
async def test_what_is_no_route(room: Room, routes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await room.core.runs.open(RunSpec(policy="pol", routes=routes))
    assert caught.value.field == field
    assert says in str(caught.value)
    assert isinstance(caught.value, UnknownName) == ("policy" in field)


async def test_a_plain_text_is_the_routes_policy(room: Room) -> None:
    given: Any = {"judge": "words", "user": {"policy": "other", "sampling": {"temperature": 0.5}}}
    run = await room.core.runs.open(RunSpec(policy="pol", routes=given))
    stored = (await room.store.get_run(run.id)).spec
    assert stored.routes["judge"] == RouteSpec(policy="words")
    assert stored.policies == ["pol", "words", "other"]
    assert (stored.sampling_of("user").temperature, stored.sampling_of("judge").temperature) == (0.5, 1.0)
    for bad in ({"judge": 3}, {"judge": {"policy": "other", "trian": True}}, {"a b": "other"}):
        with pytest.raises(ValidationError):
            RunSpec(policy="pol", routes=bad)


async def test_a_policy_without_backends_is_taken_like_the_runs_own(room: Room) -> None:
    run = await room.run(routes={"judge": RouteSpec(policy="words")})
    [group] = await room.submit(run)
    assert group.num_rollouts == 1


async def test_calls_of_routes_show_everywhere(room: Room) -> None:
    routes = {"judge": RouteSpec(policy="words"), "pupil": RouteSpec(policy="other", train=True)}
    run = await room.run(routes=routes)
    await room.core.policies.set_version("other", 7, None)
    [group] = await room.submit(run)
    await room.started(1)
    start = room.executor.history[-1]
    drift = (Drift(cause="no_tokens"),)
    pupil = msgspec.structs.replace(a_call("c2"), policy="other", route="pupil")
    judge = msgspec.structs.replace(a_call("c3", sampled=5), policy="words", route="judge", drift=drift)
    ref = room.payloads.keep("kept", AttemptPayload(calls=[a_call("c1"), pupil, judge]))
    done = ended(start, payload=ref).model_copy(update={"counts": {"sampled_tokens": 11}})
    room.executor.end(start.attempt_id, done)
    rollout = await room.ended(group, RolloutState.COMPLETED)
    made = await room.core.trajectories.samples(rollout.id)
    assert [sample.policy for sample in made.samples] == ["", "other"]
    assert made.note is None
    assert made.tokens is not None
    assert (made.tokens.trained, made.tokens.left_out) == (6, {"route_judge": 5})
    assert [place.route for place in await room.core.drifts.of_rollout(rollout.id)] == ["judge"]
    found = await room.core.verifier.verify(rollout.id, Criteria(score=False))
    assert [check.tokens for check in found.samples] == [7, 7]
    assert [each.check for each in found.findings] == []
    delivered = await room.core.deliveries.lease(run.id, Wanted(trainer="t"))
    assert delivered.lease is not None
    await room.core.deliveries.ack(delivered.lease.id)
    bins = (await room.core.runs.bins(run.id))["tokens"]
    assert {name: each.tokens for name, each in bins.items()} == {"delivered": 6, "left_out": 5}
