"""What is SGLang's own: its bodies, its streams, its aborts by prefix, its logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollserve.backend.base import Backend, GenerateRequest, LabelSpan
from rollserve.backend.sglang import GenerateFormat
from rollserve.errors import BackendError, CannotScore, ContextTooLong, InvalidInput
from rollserve.records.policy import BackendKind
from rollserve.testing.scripted import Reply, ScriptedEngine, replies
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.testing.scripted_sglang import SglangApp

Connect = Callable[..., Backend]
Ask = Callable[..., GenerateRequest]


def event(entries: str, total: int, reason: str = "null") -> bytes:
    meta = f'"completion_tokens": {total}, "finish_reason": {reason}, "output_token_logprobs": [{entries}]'
    return ('{"text": null, "meta_info": {' + meta + "}}").encode()


@pytest.mark.parametrize("second", ["[-0.5, 7, null], [-0.25, 8, null], [-1.0, 2, null]", "[-1.0, 2, null]"])
def test_a_stream_repeats_or_adds(second: str) -> None:
    """Both are told apart by the server's own count."""
    read = GenerateFormat().reader()
    (first,) = read([event("[-0.5, 7, null], [-0.25, 8, null]", 2)])
    (last,) = read([event(second, 3, '{"type": "stop", "matched": 2}')])
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([7, 8], [-0.5, -0.25], None)
    assert (last.token_ids, last.logprobs, last.finish_reason) == ([2], [-1.0], "stop")


def test_tokens_that_are_missing_are_an_error() -> None:
    read = GenerateFormat().reader()
    read([event("[-0.5, 7, null]", 1)])
    with pytest.raises(BackendError, match="counts 5 sampled tokens, 1 of them before, and has 2"):
        read([event("[-0.5, 8, null], [-0.5, 9, null]", 5)])


def test_an_error_in_a_stream_says_what_it_was() -> None:
    with pytest.raises(BackendError, match="gave up: out of memory"):
        GenerateFormat().reader()([b'{"error": {"message": "out of memory"}}'])


async def test_what_is_sent(engine: ScriptedEngine, connect: Connect, ask: Ask) -> None:
    app = SglangApp(engine)
    async with serving(app) as url:
        request = ask("gen_1", [5, 6, 7], temperature=0.7, top_p=0.9, seed=11, stop_token_ids=(2,))
        made = await connect(url, BackendKind.SGLANG).generate(
            GenerateRequest(
                request_id=request.request_id,
                model=request.model,
                token_ids=request.token_ids,
                sampling=request.sampling,
                cache_salt="p:3",
                session_id="ses_1",
            )
        )
    sent = app.asked[-1]
    assert sent.input_ids == [5, 6, 7]
    assert (sent.routing_key, sent.cache_salt) == ("ses_1", "p:3")
    assert (sent.return_logprob, sent.logprob_start_len) == (True, -1)
    sampling = sent.sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, -1, 0.0)
    assert (sampling.max_new_tokens, sampling.sampling_seed, sampling.stop_token_ids) == (16, 11, (2,))
    assert made.prompt_ids == [5, 6, 7]
    assert made.labels == (LabelSpan(0, len(made.token_ids), "step-7"),)


async def test_an_abort_spares_requests_whose_id_only_begins_the_same(
    connect: Connect, ask: Ask, eventually: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    engine = ScriptedEngine(replies(Reply(token_ids=(5, 6, 2))))
    engine.gate.clear()
    async with serving(SglangApp(engine)) as url, asyncio.TaskGroup() as tasks:
        backend = connect(url, BackendKind.SGLANG)
        first = tasks.create_task(backend.generate(ask("gen_1")))
        other = tasks.create_task(backend.generate(ask("gen_1-1")))
        await eventually(lambda: len(engine.running) == 2)
        await backend.abort(["gen_1"])
        assert (await first).finish_reason == "abort"
        engine.gate.set()
        assert (await other).finish_reason == "stop"


async def test_versions_are_inferred_where_only_the_last_is_told(
    engine: ScriptedEngine, connect: Connect, ask: Ask
) -> None:
    """The weights may have changed during the generation."""
    async with serving(SglangApp(engine, reports_spans=False)) as url:
        backend = connect(url, BackendKind.SGLANG)
        assert not (await backend.probe()).reports_versions
        assert (await backend.generate(ask())).labels is None


async def test_the_probe_tells_logprobs_after_temperature_from_raw_ones(
    engine: ScriptedEngine, connect: Connect
) -> None:
    app = SglangApp(engine)
    async with serving(app) as url:
        info = await connect(url, BackendKind.SGLANG).probe()
        assert (info.engine, info.logprobs_mode) == ("sglang 0.5.23", "temperature")
        assert info.context_tokens == engine.context_tokens - 1
        app.original_logprobs = True
        assert (await connect(url, BackendKind.SGLANG).probe()).logprobs_mode == "raw"


async def test_prompt_and_answer_must_fit_together(connect: Connect, ask: Ask) -> None:
    async with serving(SglangApp(ScriptedEngine(context_tokens=20))) as url:
        backend = connect(url, BackendKind.SGLANG)
        with pytest.raises(ContextTooLong):
            await backend.generate(ask(token_ids=[1, 2, 3, 4], max_tokens=16))
        assert (await backend.generate(ask(token_ids=[1, 2, 3], max_tokens=16))).token_ids


async def test_another_server_is_no_sglang(url: str, connect: Connect) -> None:
    with pytest.raises(InvalidInput, match="not POST /generate") as caught:
        await connect(url, BackendKind.SGLANG).probe()
    assert caught.value.field == "url"


async def test_health_has_gauges_and_no_count_of_tokens(engine: ScriptedEngine, connect: Connect) -> None:
    async with serving(SglangApp(engine)) as url:
        health = await connect(url, BackendKind.SGLANG).health()
        assert (health.ok, health.running, health.waiting) == (True, 0, 0)
        assert health.generated_tokens is None
        engine.unhealthy = "starting"
        assert not (await connect(url, BackendKind.SGLANG).health()).ok


@pytest.mark.parametrize("kind", [BackendKind.VLLM, BackendKind.OPENAI, BackendKind.SGLANG])
async def test_a_server_that_does_not_score_says_so(
    engine: ScriptedEngine, connect: Connect, kind: BackendKind
) -> None:
    engine.scores = False
    app = SglangApp(engine) if kind is BackendKind.SGLANG else ScriptedApp(engine)
    async with serving(app) as url:
        with pytest.raises(CannotScore):
            await connect(url, kind).score([1, 2, 3], model="scripted")
