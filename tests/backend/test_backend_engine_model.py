"""The simulated engine: what it costs to read, to share, to run out of cache. And through the adapter."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.backend.base import GenerateRequest
from rollserve.backend.registry import make_backend
from rollserve.records.call import SamplingParams
from rollserve.records.policy import BackendKind, BackendSpec
from rollserve.testing.engine_model import (
    BLOCK,
    EngineModel,
    KvCache,
    Machine,
    ModelledEngine,
    Request,
    chain,
    modelled_app,
)
from rollserve.testing.scripted import Reply
from rollserve.testing.scripted_server import serving

MACHINE = Machine(peak=200.0, half=1.0, cache_tokens=64 * BLOCK, read_cost=0.1)
"""One request alone samples 100 tokens a second."""


def run(model: EngineModel, *requests: Request, step_s: float = 0.01) -> float:
    """Seconds until all are over."""
    steps = 0
    while not all(request.over.is_set() for request in requests):
        model.step(step_s)
        steps += 1
        assert steps < 100_000
    return steps * step_s


def ids(start: int, tokens: int) -> list[int]:
    return list(range(start, start + tokens))


def test_a_prompt_is_read_before_the_reply_is_sampled() -> None:
    model = EngineModel(MACHINE)
    took = run(model, model.submit(ids(0, 160), ids(0, 100)))
    assert took == pytest.approx(160 * 0.1 / 100 + 1.0, abs=0.03)
    assert model.sampled == pytest.approx(100)
    assert model.worked == pytest.approx(116)


def test_what_it_has_seen_is_not_read_again() -> None:
    model = EngineModel(MACHINE)
    prompt, reply = ids(0, 160), ids(1000, 32)
    run(model, model.submit(prompt, reply))
    next_turn = [*prompt, *reply, *ids(2000, 16)]
    run(model, model.submit(next_turn, reply))
    assert model.prompt_tokens == 160 + 208
    assert model.hit_tokens == 192
    other = [7, *prompt[1:]]
    run(model, model.submit(other, reply))
    run(model, model.submit(prompt, reply, "other weights"))
    assert model.hit_tokens == 192


def test_those_who_run_share_what_it_can_do() -> None:
    model = EngineModel(MACHINE)
    alone = run(model, model.submit([1], ids(0, 100)))
    three = run(model, *(model.submit([1], ids(0, 100)) for _ in range(3)))
    assert three / alone == pytest.approx(3 * 100 / 150, abs=0.05)


def test_the_newest_gives_way_when_the_cache_is_full() -> None:
    model = EngineModel(Machine(peak=200.0, half=1.0, cache_tokens=16 * BLOCK))
    first, second = (model.submit(ids(n * 1000, 4 * BLOCK), ids(0, 6 * BLOCK)) for n in (1, 2))
    while not model.preemptions:
        model.step(0.01)
    assert model.running == [first]
    assert list(model.waiting) == [second]
    run(model, first, second)
    assert model.sampled == pytest.approx(12 * BLOCK)
    assert model.cache.use == 0


def test_what_is_dropped_leaves_its_place() -> None:
    model = EngineModel(MACHINE)
    gone, waits = model.submit(ids(0, 60 * BLOCK), ids(0, 8)), model.submit(ids(5000, 60 * BLOCK), ids(0, 8))
    model.step(0.01)
    assert model.running == [gone]
    model.drop(gone)
    run(model, waits)
    assert not gone.over.is_set()
    assert model.cache.use == 0


def test_the_longest_unused_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    cache = KvCache(4)
    one, two = chain(ids(0, 2 * BLOCK)), chain(ids(100, 2 * BLOCK))
    for names in (one, two):
        assert cache.take(names) == 0
        cache.leave(names)
    assert cache.take(chain(ids(200, BLOCK))) == 0
    assert cache.take(two) == 2
    assert cache.take(one[:1]) == 1
    assert cache.take(chain(ids(300, BLOCK))) is None


async def test_through_the_adapter_it_answers_aborts_and_tells_of_itself() -> None:
    reply = Reply(token_ids=tuple(range(3, 53)))
    engine = ModelledEngine(lambda _: reply, Machine(peak=4000.0, half=1.0, cache_tokens=1024))
    sampling = SamplingParams(temperature=1.0, max_tokens=200)
    async with serving(modelled_app(engine)) as url:
        backend = make_backend(BackendSpec(url=url, kind=BackendKind.VLLM), "scripted")
        request = GenerateRequest(
            request_id="r", model="scripted", token_ids=ids(10, 320), sampling=sampling, cache_salt="1"
        )
        assert list((await backend.generate(request)).token_ids) == list(reply.token_ids)
        health = await backend.health()
        assert (health.generated_tokens, health.kv_use, health.preemptions) == (50, 0.0, 0)
        engine.simulation.machine = Machine(peak=1.0, half=1.0, cache_tokens=1024)
        slow = asyncio.create_task(backend.generate(request))
        while not engine.simulation.running:
            await asyncio.sleep(0.005)
        assert engine.simulation.hit_tokens == 320
        await backend.abort(["r"])
        assert (await slow).finish_reason == "abort"
        assert not engine.simulation.running
        await backend.close()
