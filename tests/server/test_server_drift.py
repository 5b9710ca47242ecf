"""The drift of a run, read from what its rollouts recorded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollserve.errors import NotFound
from rollserve.records.call import Call, Drift
from rollserve.records.drift import DriftCause, RolloutDrift
from rollserve.records.rollout import RolloutState
from rollserve.records.run import Run
from rollserve.rollouts.delivery import Wanted
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fakes_server import a_call, ended
from rollserve.testing.server_room import Room

SPACED = Drift(cause="arguments_reserialized", absorbed=True, at_token=7)
LOST = Drift(cause="backend_ids", untrainable=3)
EDITED = Drift(cause="history_edited")


async def rollout(room: Room, run: Run, *calls: Call, **how: Any) -> str:
    before = len(room.executor.history)
    (group,) = await room.submit(run, **how)
    await room.until(lambda: len(room.executor.history) > before)
    start = room.executor.history[-1]
    ref = room.payloads.keep(f"kept {start.attempt_id}", AttemptPayload(calls=list(calls)))
    room.executor.end(start.attempt_id, ended(start, payload=ref))
    return (await room.ended(group, RolloutState.COMPLETED)).id


def drifted(call: Call, *drifts: Drift, **changes: Any) -> Call:
    return msgspec.structs.replace(call, drift=drifts, **changes)


async def of_run(room: Room, run: Run, cause: str | None = None) -> list[RolloutDrift]:
    found, cursor = [], None
    while True:
        page = await room.core.drifts.of_run(run.id, cause=cause, cursor=cursor, limit=1)
        found += page.items
        cursor = page.next
        if cursor is None:
            return found


async def test_causes_are_summed_and_lost_tokens_belong_to_one(room: Room) -> None:
    run = await room.run()
    one = await rollout(
        room,
        run,
        a_call("a"),
        drifted(a_call("b", "a"), SPACED, SPACED),
        drifted(a_call("c", "b"), LOST, inexact="backend_ids"),
        a_call("d", "c"),
    )
    two = await rollout(room, run, a_call("a"), drifted(a_call("b"), EDITED))
    every = {each.rollout_id: each for each in await of_run(room, run)}
    assert every[one].causes == [
        DriftCause(cause="arguments_reserialized", times=2, absorbed=2, untrainable=0),
        DriftCause(cause="backend_ids", times=1, absorbed=0, untrainable=6),
    ]
    assert (every[one].calls, every[one].sampled) == (4, 12)
    assert [cause.cause for cause in every[two].causes] == ["history_edited"]
    assert [each.rollout_id for each in await of_run(room, run, "history_edited")] == [two]


async def test_each_place_of_a_rollout(room: Room) -> None:
    run = await room.run()
    calls = (a_call("a"), drifted(a_call("b", "a"), SPACED, EDITED, label="fork"))
    found = await room.core.drifts.of_rollout(await rollout(room, run, *calls))
    assert [(each.call_id, each.label, each.drift) for each in found] == [
        ("b", "fork", SPACED),
        ("b", "fork", EDITED),
    ]


async def test_what_has_not_begun_or_can_not_be_read(room: Room) -> None:
    run = await room.run()
    broken = await rollout(room, run, a_call("a"))
    room.payloads.unreadable.update(room.payloads.kept)
    (found,) = await of_run(room, run)
    assert (found.rollout_id, found.calls) == (broken, 0)
    assert found.note
    await room.core.runs.pause(run.id)
    await room.submit(run)
    assert len(await of_run(room, run)) == 1
    with pytest.raises(NotFound):
        await room.core.drifts.of_run("run_none", cause=None, cursor=None, limit=1)


async def test_a_delivery_says_what_became_of_the_tokens(room: Room) -> None:
    run = await room.run()
    await rollout(
        room, run, a_call("a"), a_call("b", "a"), msgspec.structs.replace(a_call("t"), label="side")
    )
    delivered = await room.core.deliveries.lease(run.id, Wanted(trainer="t"))
    (made,) = delivered.groups[0].rollouts
    assert made.tokens is not None
    assert (made.tokens.sampled, made.tokens.trained, made.tokens.left_out) == (9, 6, {"label_side": 3})
    assert (made.tokens.calls, made.tokens.sequences) == (3, 1)
    assert made.note is None
