"""The engine without HTTP: what it samples, and what it says about it, against a plain forward pass."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rollserve.errors import ConfigError, Conflict, InvalidInput, QueueFull
from rollserve.localserver.engine import Engine
from rollserve.localserver.model import BatchModel, load_model
from rollserve.localserver.request import SamplingParams, VersionSpan
from rollserve.localserver.sampler import sample
from rollserve.localserver.sequence import Sequence
from rollserve.localserver.weights import check_checkpoint, load_weights, read_checkpoint

VOCAB = 300


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = Random(f"{length} {seed}")
    return [rng.randrange(VOCAB) for _ in range(length)]


def make(ids: list[int], limit: int = 12, eos: int | None = None, **params: Any) -> Sequence:
    sampling = SamplingParams(**params)
    eos_ids = frozenset() if eos is None else frozenset([eos])
    return Sequence("r", ids, sampling, limit=limit, eos_ids=eos_ids)


def run(engine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        engine.submit(sequence)
    while engine.has_work:
        engine.step()


def reference(model: torch.nn.Module, sequence: Sequence, temperature: float = 1.0) -> list[float]:
    """Logprobs of the sampled tokens by one forward pass over the whole, no cache, no batch."""
    ids = torch.tensor([sequence.prompt_ids + sequence.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    first = len(sequence.prompt_ids)
    return [float(logprobs[first + i - 1, token]) for i, token in enumerate(sequence.token_ids)]


LENGTHS = (1, 2, 7, 30, 31, 64, 90, 150)


def test_batched_logprobs_equal_a_plain_forward(batch_model: BatchModel) -> None:
    sequences = [make(prompt(n), limit=5 + 3 * i, seed=i) for i, n in enumerate(LENGTHS)]
    run(Engine(batch_model), *sequences)
    for sequence in sequences:
        assert sequence.logprobs == pytest.approx(reference(batch_model.module, sequence), abs=1e-4)


def test_joining_a_running_batch_changes_nothing(batch_model: BatchModel) -> None:
    engine = Engine(batch_model)
    alone = [make(prompt(n), limit=20, seed=n) for n in LENGTHS]
    for sequence in alone:
        run(engine, sequence)
    together = [make(prompt(n), limit=20, seed=n) for n in LENGTHS]
    for sequence in together:
        engine.submit(sequence)
        engine.step()
        engine.step()
    run(engine)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_long_prompts_run_in_chunks(batch_model: BatchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollserve.localserver.model._PREFILL_CHUNK", 16)
    sequences = [make(prompt(n), limit=6, seed=n) for n in (5, 16, 17, 48, 100)]
    run(Engine(batch_model), *sequences)
    for sequence in sequences:
        assert sequence.logprobs == pytest.approx(reference(batch_model.module, sequence), abs=1e-4)


def test_other_architectures() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.3,
    }
    llama = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, **sizes
    )
    gpt2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=256, **sizes)
    for module in (LlamaForCausalLM(llama), GPT2LMHeadModel(gpt2)):
        model = BatchModel(module.train(False), max_batch=8)
        sequences = [make(prompt(n), limit=6, seed=n) for n in LENGTHS]
        run(Engine(model), *sequences)
        for sequence in sequences:
            assert sequence.logprobs == pytest.approx(reference(model.module, sequence), abs=1e-4)


def test_prefill_budget_admits_at_least_one(batch_model: BatchModel) -> None:
    engine = Engine(batch_model, prefill_tokens=10)
    for sequence in (make(prompt(50)), make(prompt(4)), make(prompt(4))):
        engine.submit(sequence)
    engine.step()
    assert (len(engine.running), len(engine.waiting)) == (1, 2)
    engine.step()
    assert (len(engine.running), len(engine.waiting)) == (3, 0)


def test_temperature_is_in_the_logprobs(batch_model: BatchModel) -> None:
    sequence = make(prompt(9), temperature=0.6, seed=4)
    run(Engine(batch_model), sequence)
    assert sequence.logprobs == pytest.approx(reference(batch_model.module, sequence, 0.6), abs=1e-4)


def test_greedy_takes_the_most_likely_and_reports_its_plain_logprob(batch_model: BatchModel) -> None:
    sequence = make(prompt(9), temperature=0.0, top_k=3, top_p=0.5)
    run(Engine(batch_model), sequence)
    assert sequence.ranks == [1] * 12
    assert sequence.logprobs == pytest.approx(reference(batch_model.module, sequence), abs=1e-4)


def test_seed_repeats_and_no_seed_differs(batch_model: BatchModel) -> None:
    engine = Engine(batch_model)
    same = [make(prompt(5), seed=7) for _ in range(2)]
    free = [make(prompt(5)) for _ in range(2)]
    run(engine, *same, *free)
    assert same[0].token_ids == same[1].token_ids
    assert free[0].token_ids != free[1].token_ids


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.4}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),
    ],
)
def test_filters_draw_from_and_report_the_filtered_distribution(
    params: dict[str, Any], allowed: set[int]
) -> None:
    plain = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn: dict[int, float] = {}
    rows = [make([0], seed=i, **params) for i in range(400)]
    for token, logprob, rank in sample(plain.log().expand(400, -1), rows):
        assert rank == token + 1
        drawn[token] = logprob
    assert set(drawn) == allowed
    mass = float(plain[sorted(allowed)].sum())
    for token, logprob in drawn.items():
        assert logprob == pytest.approx(float((plain[token] / mass).log()), abs=1e-5)


def test_draws_follow_the_distribution() -> None:
    plain = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = [make([0], seed=i) for i in range(4000)]
    counts = torch.zeros(4)
    for token, _, _ in sample(plain.log().expand(4000, -1), rows):
        counts[token] += 1
    assert counts / 4000 == pytest.approx(plain, abs=0.03)


def test_stop_token_is_kept_and_named(batch_model: BatchModel) -> None:
    engine = Engine(batch_model)
    free = make(prompt(6), limit=10, seed=1)
    run(engine, free)
    fourth = free.token_ids[3]
    at = free.token_ids.index(fourth) + 1
    stopped = make(prompt(6), limit=10, seed=1, stop_token_ids=[fourth])
    ended = make(prompt(6), limit=10, seed=1, eos=fourth)
    run(engine, stopped, ended)
    for sequence in (stopped, ended):
        assert sequence.token_ids == free.token_ids[:at]
        assert sequence.finish_reason == "stop"
    assert (stopped.stop_reason, ended.stop_reason) == (fourth, None)


def test_min_tokens_hold_the_stop_back(batch_model: BatchModel) -> None:
    everything = list(range(VOCAB - 1))
    early = make(prompt(6), stop_token_ids=everything, seed=3)
    late = make(prompt(6), stop_token_ids=everything, min_tokens=3, seed=3)
    run(Engine(batch_model), early, late)
    assert len(early.token_ids) == 1
    assert late.token_ids[:3] == [VOCAB - 1] * 3
    assert len(late.token_ids) > 3


def test_waiting_requests_fill_freed_slots(model_dir: Path) -> None:
    model = BatchModel(load_model(str(model_dir), device="cpu", dtype="float32"), max_batch=3)
    sequences = [make(prompt(3 + n % 5, n), limit=1 + n % 7, seed=n) for n in range(25)]
    engine = Engine(model)
    run(engine, *sequences)
    assert [len(s.token_ids) for s in sequences] == [1 + n % 7 for n in range(25)]
    for sequence in sequences:
        assert sequence.logprobs == pytest.approx(reference(model.module, sequence), abs=1e-4)
    assert engine.counters.finished == 25


def test_the_queue_is_bounded(batch_model: BatchModel) -> None:
    engine = Engine(batch_model, max_waiting=2)
    for _ in range(2):
        engine.submit(make(prompt(3)))
    with pytest.raises(QueueFull):
        engine.submit(make(prompt(3)))


def test_abort_keeps_what_was_sampled(batch_model: BatchModel) -> None:
    engine = Engine(batch_model)
    kept, gone, waiting = make(prompt(3), limit=30), make(prompt(4), limit=30), make(prompt(5))
    engine.submit(kept)
    engine.submit(gone)
    for _ in range(5):
        engine.step()
    engine.submit(waiting)
    engine.abort(lambda sequence: sequence in (gone, waiting))
    run(engine)
    assert (gone.finish_reason, len(gone.token_ids)) == ("abort", 5)
    assert (waiting.finish_reason, waiting.token_ids) == ("abort", [])
    assert (kept.finish_reason, len(kept.token_ids)) == ("length", 30)
    assert kept.logprobs == pytest.approx(reference(batch_model.module, kept), abs=1e-4)


def test_update_between_two_steps_splits_the_versions(batch_model: BatchModel, other_dir: Path) -> None:
    engine = Engine(batch_model, weight_version="a")
    sequence = make(prompt(8), limit=10, seed=2)
    engine.submit(sequence)
    for _ in range(4):
        engine.step()
    tensors = read_checkpoint(str(other_dir))
    engine.update_weights(lambda: load_weights(batch_model.module, tensors), "b", "keep").result()
    run(engine)
    assert sequence.spans == [VersionSpan("a", 0, 4), VersionSpan("b", 4, 10)]
    fresh = make(prompt(8), limit=10, seed=2)
    run(engine, fresh)
    assert fresh.spans == [VersionSpan("b", 0, 10)]
    other = load_model(str(other_dir), device="cpu", dtype="float32")
    assert fresh.logprobs == pytest.approx(reference(other, fresh), abs=1e-4)


def test_update_that_waits_lets_requests_end_first(batch_model: BatchModel) -> None:
    engine = Engine(batch_model, weight_version="a")
    before, after = make(prompt(4), limit=6), make(prompt(4), limit=6)
    engine.submit(before)
    engine.step()
    settled = engine.update_weights(lambda: None, "b", "wait")
    engine.submit(after)
    engine.step()
    assert not settled.done()
    run(engine)
    assert settled.result() is None
    assert (before.spans, after.spans) == ([VersionSpan("a", 0, 6)], [VersionSpan("b", 0, 6)])


def test_a_failed_load_leaves_the_version(batch_model: BatchModel) -> None:
    def broken() -> None:
        raise OSError("disk")

    engine = Engine(batch_model, weight_version="a")
    engine.submit(make(prompt(4), limit=6))
    engine.step()
    settled = engine.update_weights(broken, "b", "wait")
    run(engine)
    with pytest.raises(OSError, match="disk"):
        settled.result()
    assert engine.weight_version == "a"
    assert not engine.has_work


def test_pause_keep_freezes_and_resume_goes_on(batch_model: BatchModel) -> None:
    engine = Engine(batch_model)
    sequence, later = make(prompt(4), limit=9, seed=1), make(prompt(4), limit=9, seed=1)
    engine.submit(sequence)
    engine.step()
    engine.pause("keep").result()
    engine.submit(later)
    assert not engine.has_work
    with pytest.raises(Conflict, match="mode"):
        engine.update_weights(lambda: None, "b", "wait")
    engine.resume()
    run(engine)
    assert sequence.token_ids == later.token_ids


def test_a_model_that_gives_nan_fails_the_request(batch_model: BatchModel) -> None:
    with torch.no_grad():
        next(batch_model.module.parameters()).fill_(float("nan"))
    sequence = make(prompt(4))
    run(Engine(batch_model), sequence)
    assert sequence.failure is not None
    assert "not numbers" in sequence.failure


def test_checkpoints_are_checked_by_name(batch_model: BatchModel, model_dir: Path, tmp_path: Path) -> None:
    good = load_file(model_dir / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    bad = {
        "shape": {**good, name: good[name][:-1]},
        "missing": {key: tensor for key, tensor in good.items() if key != name},
        "not finite": {**good, name: good[name] * float("nan")},
    }
    for text, tensors in bad.items():
        with pytest.raises(InvalidInput, match=f"{name}.*{text}"):
            check_checkpoint(batch_model.module, tensors)
    with pytest.raises(InvalidInput, match=r"'surprise' is not in the model"):
        check_checkpoint(batch_model.module, {**good, "surprise": torch.zeros(1)})
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not a checkpoint")
    for place in (broken, tmp_path / "absent", model_dir / "config.json"):
        with pytest.raises(InvalidInput):
            read_checkpoint(str(place))


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_model(str(tmp_path), device="cpu", dtype="float32")


def test_context_beyond_the_model_is_refused(batch_model: BatchModel) -> None:
    with pytest.raises(ConfigError, match="512"):
        BatchModel(batch_model.module, max_batch=2, max_model_len=513)
