"""Generations that updates of the weights stop on their way: one call, with the truth of each part."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.gateway.conftest import World, eventually

from rollserve.backend.base import GenerateRequest, Generation, LabelSpan
from rollserve.errors import BackendUnavailable
from rollserve.gateway import whole
from rollserve.records.call import Message, VersionSpan, unpack_floats, unpack_ids
from rollserve.records.update import UpdateMode, UpdateState, WeightUpdate

USER = Message(role="user", content="q")


def an_update(mode: UpdateMode, **changes: Any) -> WeightUpdate:
    fields: dict[str, Any] = {"id": "up1", "policy": "p", "mode": mode, "state": UpdateState.READY}
    times = {"lease_s": 60, "begun_at": 0, "expires_at": 60, "from_version": 1, "weights": 1}
    return WeightUpdate(**{**fields, **times, "backends": ["b1"], **changes})


class Stopped:
    """A backend that stops its first generations with ``parts``, as an update of mode *abort* does."""

    def __init__(self, world: World, *parts: str) -> None:
        self.world = world
        self.left = list(parts)
        self.at = 1

    def __call__(self, request: GenerateRequest) -> Generation:
        finish = "abort" if len(self.left) > 1 else "stop"
        generation = self.world.generation(self.left.pop(0), finish_reason=finish)
        if finish == "abort":
            self.world.view(version=self.at, weights=self.at, update=an_update(UpdateMode.ABORT))
            self.at += 1
        return generation


async def committed(world: World, version: int) -> None:
    """Wait until a call waits for the update, then end it."""
    await eventually(lambda: world.clock.now)
    done = an_update(UpdateMode.ABORT, state=UpdateState.COMMITTED)
    world.view(version=version, weights=version, update=done)


async def test_a_stopped_call_goes_on_from_its_tokens_under_the_new_version(world: World) -> None:
    world.view(version=1, weights=1)
    world.pool.script = Stopped(world, "the first half", " and the second")
    session = await world.open(run={"sampling": {"max_tokens": 100, "seed": 3}})
    call = asyncio.create_task(session.model.chat([USER]))
    await committed(world, 2)
    reply = await call
    first, second = world.pool.requests
    head = world.ids("the first half", stop=False)
    tail = world.ids(" and the second")
    assert second.token_ids == [*first.token_ids, *head]
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (100, 100 - len(head))
    assert (first.cache_salt, second.cache_salt) == ("p:1.1", "p:2.2")
    assert first.request_id != second.request_id
    (recorded,) = world.segments[0].calls
    assert reply.message.content == "the first half and the second"
    assert unpack_ids(recorded.prompt_ids).tolist() == first.token_ids
    assert unpack_ids(recorded.sampled_ids).tolist() == [*head, *tail]
    assert recorded.finish_reason == "stop"
    assert recorded.versions == (
        VersionSpan(0, len(head), 1, 1, True),
        VersionSpan(len(head), len(head) + len(tail), 2, 2, True),
    )
    expected = [-0.5 - i / 100 for i in range(len(head))] + [-0.5 - i / 100 for i in range(len(tail))]
    assert np.allclose(unpack_floats(recorded.logprobs), expected)
    assert recorded.inexact is None
    assert world.clock.now == 0
    assert session.counts["sampled_tokens"] == len(head) + len(tail)


async def test_several_updates_in_one_call(world: World) -> None:
    world.view(version=1, weights=1)
    world.pool.script = Stopped(world, "a b", " c", "", " d")
    session = await world.open()
    call = asyncio.create_task(session.model.chat([USER]))
    for version in (2, 3, 4):
        await committed(world, version)
        while len(world.pool.requests) < version:
            await asyncio.sleep(0)
    await call
    (recorded,) = world.segments[0].calls
    assert [span.version for span in recorded.versions] == [1, 2, 4]
    assert recorded.versions[-1].end == len(unpack_ids(recorded.sampled_ids))


async def test_labels_of_the_parts_are_each_in_their_place(world: World) -> None:
    world.view(version=1, weights=1, labels={"one": 1})
    head, tail = world.ids("so", stop=False), world.ids(" be it")

    def script(request: GenerateRequest) -> Generation:
        if len(world.pool.requests) == 1:
            world.view(version=1, weights=1, labels={"one": 1}, update=an_update(UpdateMode.ABORT))
            spans = (LabelSpan(0, len(head), "one"),)
            return world.generation("so", finish_reason="abort", labels=spans)
        return world.generation(" be it", labels=(LabelSpan(0, len(tail), "two"),))

    world.pool.script = script
    session = await world.open()
    call = asyncio.create_task(session.model.chat([USER]))
    await eventually(lambda: world.clock.now)
    world.view(version=2, weights=2, labels={"one": 1, "two": 2})
    await call
    assert world.segments[0].calls[0].versions == (
        VersionSpan(0, len(head), 1, 1),
        VersionSpan(len(head), len(head) + len(tail), 2, 2),
    )


async def test_the_next_call_extends_the_joined_ids(world: World) -> None:
    world.view(version=1, weights=1)
    world.pool.script = Stopped(world, "one two", " three")
    session = await world.open(run={"sampling": {"max_tokens": 50}})
    call = asyncio.create_task(session.model.chat([USER]))
    await committed(world, 2)
    reply = await call
    world.pool.script = world.says("fine")
    await session.model.chat([USER, reply.message, Message(role="user", content="more")])
    context = world.pool.requests[-1].token_ids
    (first, _) = world.segments[0].calls
    assert context[: len(unpack_ids(first.prompt_ids)) + len(unpack_ids(first.sampled_ids))] == [
        *unpack_ids(first.prompt_ids).tolist(),
        *unpack_ids(first.sampled_ids).tolist(),
    ]


async def test_what_is_used_up_when_it_stops_is_cut_by_length(world: World) -> None:
    world.pool.script = Stopped(world, "a b c d", "never")
    count = len(world.ids("a b c d", stop=False))
    session = await world.open(run={"sampling": {"max_tokens": count}})
    reply = await session.model.chat([USER])
    assert reply.finish_reason == "length"
    assert len(world.pool.requests) == 1


async def test_a_backend_that_stops_everything_is_an_error_not_a_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "FIRST_REST_S", 0.0001)
    world.pool.script = lambda request: world.generation("", finish_reason="abort")
    session = await world.open()
    with pytest.raises(BackendUnavailable, match="stops each generation by itself"):
        await session.model.chat([USER])
    assert len(world.pool.requests) == whole.FRUITLESS
    assert world.segments[0].calls == []


async def test_other_ids_consumed_in_a_later_part_are_found(world: World) -> None:
    def script(request: GenerateRequest) -> Generation:
        if len(world.pool.requests) == 1:
            return world.generation("x", finish_reason="abort", prompt_ids=request.token_ids)
        return world.generation(" y", prompt_ids=request.token_ids[:-1])

    world.pool.script = script
    session = await world.open()
    await session.model.chat([USER])
    assert world.segments[0].calls[0].inexact == "backend_ids"


async def test_opaque_arrays_of_the_parts_are_kept_apart(world: World) -> None:
    def script(request: GenerateRequest) -> Generation:
        first = len(world.pool.requests) == 1
        return world.generation(
            "x", finish_reason="abort" if first else "stop", extras={"experts": b"1" if first else b"2"}
        )

    world.pool.script = script
    session = await world.open()
    await session.model.chat([USER])
    count = len(world.ids("x", stop=False))
    assert world.segments[0].calls[0].extras == {"experts": b"1", f"experts.{count}": b"2"}


# ── keep


async def test_tokens_on_an_older_cache_are_marked_mixed(world: World) -> None:
    world.view(version=1, labels={"one": 1}, weights=1)
    count = len(world.ids("abc"))
    spans = (LabelSpan(0, 1, "one"), LabelSpan(1, count, "two"))
    world.pool.gate = asyncio.Event()
    world.pool.script = lambda request: world.generation("abc", labels=spans)
    session = await world.open()
    call = asyncio.create_task(session.model.chat([USER]))
    await world.pool.started.wait()
    world.view(version=1, labels={"one": 1}, weights=1, update=an_update(UpdateMode.KEEP))
    world.pool.gate.set()
    await eventually(lambda: world.clock.now)
    assert not call.done(), "what the label means is known once the update is committed"
    world.view(version=2, labels={"one": 1, "two": 2}, weights=2)
    await call
    assert world.segments[0].calls[0].versions == (
        VersionSpan(0, 1, 1, 1),
        VersionSpan(1, count, 2, 2, mixed=True),
    )


async def test_without_labels_a_kept_generation_lies_between_the_versions(world: World) -> None:
    world.view(version=1, weights=1)
    world.pool.gate = asyncio.Event()
    world.pool.script = lambda request: world.generation("abc")
    session = await world.open()
    call = asyncio.create_task(session.model.chat([USER]))
    await world.pool.started.wait()
    world.view(version=1, weights=1, update=an_update(UpdateMode.KEEP))
    world.pool.gate.set()
    await eventually(lambda: world.clock.now)
    world.view(version=2, weights=2)
    await call
    (span,) = world.segments[0].calls[0].versions
    assert (span.version, span.version_high, span.inferred, span.mixed) == (1, 2, True, True)


async def test_new_calls_wait_uncharged_during_an_update(world: World) -> None:
    world.view(update=an_update(UpdateMode.DRAIN))
    session = await world.open()
    call = asyncio.create_task(session.model.chat([USER]))
    await eventually(lambda: world.clock.now)
    assert not world.pool.requests
    assert world.pool.held is not None
    world.view(version=1)
    await call
    assert world.pool.held is None
    assert world.clock.now == 0


async def test_the_label_of_a_server_is_not_an_adapters(world: World) -> None:
    """It is of the server's whole model, and may look like a version."""
    labels = (LabelSpan(0, 1, "7"),)
    world.pool.info = world.pool.info.model_copy(update={"adapter_of": "base"})
    world.pool.script = lambda request: world.generation("a", finish_reason="length", labels=labels)
    world.view(version=3)
    session = await world.open()
    await session.model.chat([Message(role="user", content="hi")])
    (call,) = world.segments[0].calls
    assert {(span.version, span.inferred) for span in call.versions} == {(3, True)}
