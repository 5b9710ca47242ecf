"""Samples of finished rollouts, proved and scored again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rollserve.backend.base import Backend
from rollserve.errors import NotFound
from rollserve.gateway.tokens import load_tokenizer
from rollserve.records.call import Call, Message, SamplingParams, VersionSpan, pack_floats, pack_ids
from rollserve.records.image import Image, PlacedImage
from rollserve.records.policy import BackendInfo, BackendSpec
from rollserve.records.rollout import RolloutState
from rollserve.records.verification import SampleCheck, Verification
from rollserve.rollouts.verify import Criteria, Verifier
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, a_call, ended
from rollserve.testing.scripted import Reply, ScriptedBackend, ScriptedEngine, logprob_of, replies
from rollserve.testing.server_room import MakeRoom, Room

IDS = [104, 105, 106]
TEXT = load_tokenizer("tiny").decode(IDS)


def scripted_call(call_id: str = "c1", **changes: Any) -> Call:
    """As the scripted engine would have sampled it."""
    logprobs = pack_floats([logprob_of(token_id) for token_id in IDS])
    call = msgspec.structs.replace(
        a_call(call_id),
        sampled_ids=pack_ids(IDS),
        logprobs=logprobs,
        logprobs_mode="processed",
        reply=Message(role="assistant", content=TEXT),
    )
    return msgspec.structs.replace(call, **changes)


class Bench:
    """A room whose one rollout made ``calls``, and a verifier that scores with ``engine``."""

    def __init__(self, room: Room, payloads: FakePayloads) -> None:
        self.room = room
        self.payloads = payloads
        self.engine = ScriptedEngine(replies(Reply(token_ids=(5, 2))), model="m", label=None)
        self.opened: list[ScriptedBackend] = []
        self.verifier = Verifier(replace(room.core._ports, open_backend=self._open), room.core.trajectories)

    def _open(self, spec: BackendSpec, model: str) -> Backend:
        self.opened.append(ScriptedBackend(self.engine))
        return self.opened[-1]

    async def rollout(self, *calls: Call, **run: Any) -> str:
        opened = await self.room.run(**run)
        (group,) = await self.room.submit(opened)
        await self.room.started(1)
        start = self.room.executor.history[-1]
        ref = self.payloads.keep("kept", AttemptPayload(calls=list(calls)))
        self.room.executor.end(start.attempt_id, ended(start, payload=ref))
        return (await self.room.ended(group, RolloutState.COMPLETED)).id

    async def register(self, reports_versions: bool = False) -> str:
        backend = await self.room.core.policies.register("pol", BackendSpec(url="http://b"))
        info = BackendInfo(engine="fake", models=["m"], reports_versions=reports_versions)
        await self.room.store.put_backend(backend.model_copy(update={"info": info}))
        return backend.id

    async def verify(self, rollout_id: str, **wanted: Any) -> Verification:
        found = await self.verifier.verify(rollout_id, Criteria(**wanted))
        assert all(backend.closed for backend in self.opened)
        return found

    async def only(self, rollout_id: str, **wanted: Any) -> SampleCheck:
        (sample,) = (await self.verify(rollout_id, **wanted)).samples
        return sample


@pytest.fixture
async def bench(make_room: MakeRoom) -> AsyncIterator[Bench]:
    payloads = FakePayloads()
    async with make_room(FakeExecutor(), payloads=payloads) as room:
        made = Bench(room, payloads)
        yield made
        made.verifier.close()


async def test_the_same_weights_give_the_same_numbers(bench: Bench) -> None:
    rollout_id = await bench.rollout(scripted_call())
    backend_id = await bench.register()
    found = await bench.verify(rollout_id)
    (sample,) = found.samples
    assert found.ok, found
    assert (sample.tokens, sample.trained, sample.not_scored) == (7, 3, None)
    assert sample.difference is not None
    assert (sample.difference.backend_id, sample.difference.compared) == (backend_id, 3)
    assert sample.difference.max == pytest.approx(0, abs=1e-6)


async def test_other_weights_show_as_a_number(bench: Bench) -> None:
    rollout_id = await bench.rollout(scripted_call())
    await bench.register()
    bench.engine.score_shift = 0.3
    found = await bench.verify(rollout_id)
    (sample,) = found.samples
    assert sample.difference is not None
    assert sample.difference.mean == pytest.approx(0.3, abs=1e-6)
    assert [finding.check for finding in sample.findings] == ["difference"]
    assert not found.ok
    assert (await bench.verify(rollout_id, mean_difference=0.5)).ok


async def test_the_worst_token_is_named(bench: Bench) -> None:
    wrong = [logprob_of(token_id) for token_id in IDS]
    wrong[1] -= 2.0
    rollout_id = await bench.rollout(scripted_call(logprobs=pack_floats(wrong)))
    await bench.register()
    sample = await bench.only(rollout_id)
    worst = sample.difference
    assert worst is not None
    assert (worst.at, worst.token_id, worst.text) == (5, IDS[1], load_tokenizer("tiny").decode(IDS[1:2]))
    assert worst.max == pytest.approx(2.0, abs=1e-5)
    assert worst.recorded - worst.scored == pytest.approx(-2.0, abs=1e-5)
    assert sample.findings[0].at == 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"versions": (VersionSpan(0, 3, 2, 2),)}, "sampled by version 2, the backend serves 3"),
        (
            {"versions": (VersionSpan(0, 3, 2, 3, True),)},
            "sampled by version 2 to 3, the backend serves 3",
        ),
        (
            {"versions": (VersionSpan(0, 3, 3, 3),), "sampling": SamplingParams(temperature=0.7, top_p=0.9)},
            "sampled at temperature 0.7, top_p 0.9",
        ),
        (
            {
                "versions": (VersionSpan(0, 3, 3, 3),),
                "constrained": True,
                "extras": {"sampling_mask": b"123"},
            },
            "sampled under a constraint",
        ),
        (
            {
                "versions": (VersionSpan(0, 3, 3, 3),),
                "images": (PlacedImage(image=Image(digest="d"), start=0, end=2, exact=True),),
            },
            "the model saw images, and a score is of ids alone",
        ),
    ],
)
async def test_what_can_not_be_compared_is_said(bench: Bench, change: Any, reason: str) -> None:
    rollout_id = await bench.rollout(scripted_call(**change))
    await bench.register()
    await bench.room.core.policies.set_version("pol", 3, None)
    found = await bench.verify(rollout_id)
    assert (found.samples[0].difference, found.samples[0].not_scored) == (None, reason)
    assert found.ok


async def test_tokens_of_the_version_that_is_served_are_compared(bench: Bench) -> None:
    versions = (VersionSpan(0, 1, 2, 2), VersionSpan(1, 3, 3, 3))
    rollout_id = await bench.rollout(scripted_call(versions=versions))
    await bench.register()
    await bench.room.core.policies.set_version("pol", 3, None)
    sample = await bench.only(rollout_id)
    assert sample.difference is not None
    assert sample.difference.compared == 2
    assert sample.difference.skipped == {"sampled by version 2, the backend serves 3": 1}


async def test_a_backend_that_tells_its_version_is_believed(bench: Bench) -> None:
    """The policy may be ahead of it."""
    rollout_id = await bench.rollout(scripted_call())
    await bench.register(reports_versions=True)
    bench.engine.label = "step-9"
    await bench.room.core.policies.set_version("pol", 9, "step-9")
    assert (await bench.only(rollout_id)).not_scored == "sampled by version 0, the backend serves 9"
    bench.engine.label = "0"
    assert (await bench.only(rollout_id)).difference is not None


async def test_raw_logprobs_can_be_compared_at_any_temperature(bench: Bench) -> None:
    call = scripted_call(logprobs_mode="raw", sampling=SamplingParams(temperature=0.5))
    rollout_id = await bench.rollout(call)
    await bench.register()
    assert (await bench.only(rollout_id)).difference is not None


async def test_why_nothing_was_scored(bench: Bench) -> None:
    rollout_id = await bench.rollout(scripted_call())
    assert (await bench.only(rollout_id)).not_scored == "policy 'pol' has no active backend"
    backend_id = await bench.register()
    assert (await bench.only(rollout_id, score=False)).not_scored == "not asked for"
    bench.engine.scores = False
    assert f"backend {backend_id} can't score" in ((await bench.only(rollout_id)).not_scored or "")
    with pytest.raises(NotFound):
        await bench.verify(rollout_id, backend_id="be_none")
    with pytest.raises(NotFound):
        await bench.verify("rol_none")


async def test_what_is_broken_is_found_and_not_scored(bench: Bench) -> None:
    rollout_id = await bench.rollout(scripted_call(reply=Message(role="assistant", content="another answer")))
    await bench.register()
    found = await bench.verify(rollout_id)
    assert not found.ok
    assert [each.check for each in found.samples[0].findings] == ["reply"]
    assert found.samples[0].not_scored == "it is broken"


async def test_a_payload_that_is_gone_is_no_success(bench: Bench) -> None:
    rollout_id = await bench.rollout(scripted_call())
    bench.payloads.unreadable.add("kept")
    found = await bench.verify(rollout_id)
    assert not found.ok
    assert "bad block" in (found.note or "")


async def test_a_rollout_without_samples_is_no_success(bench: Bench) -> None:
    run = await bench.room.run()
    (group,) = await bench.room.submit(run)
    rollout = await bench.room.rollout(group)
    found = await bench.verify(rollout.id)
    assert (found.ok, found.samples) == (False, [])
    assert "has no samples" in (found.note or "")
