"""The demo's tokenizer, task, rendering and model."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollserve.sandbox.tools.plain import ShellTool, SubmitTool
from rollserve.tiny_tokenizer import TinyTokenizer, build, tokenizer_file
from rollserve.trainers.tiny.demonstrations import Demonstrations, Mixture, Values, _render, _ways, paths
from rollserve.trainers.tiny.model import make_model, save_model, token_logprobs
from rollserve.trainers.tiny.rendering import Rendering
from rollserve.trainers.tiny.selfcheck import Check, learn
from rollserve.trainers.tiny.task import (
    HARD_DIGITS,
    SHELL_TOOL,
    Mix,
    make_easy,
    make_hard,
    make_task,
    simulate,
)
from rollserve.trainers.tiny.warmstart import WarmStart, warm_start

TOKENIZER = TinyTokenizer()


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering()


def test_the_checked_in_tokenizer_is_what_the_script_makes() -> None:
    assert tokenizer_file().read_text() == build().to_str()
    assert tokenizer_file().stat().st_size < 60_000


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_an_episode_is_few_tokens(rendering: Rendering) -> None:
    prompt = rendering.prompt("lookup q")
    call = rendering.call("cat q")
    after = rendering.extend(prompt, call, "see k")
    assert after[: len(prompt) + len(call)] == prompt + call
    assert (len(prompt), len(call), len(after) - len(prompt) - len(call)) == (36, 9, 19)
    assert len(Rendering([ShellTool.schema, SubmitTool.schema]).prompt("lookup q")) < 60


def test_turns_are_parsed(rendering: Rendering) -> None:
    assert rendering.parse(rendering.call("cat q")) == ("cat q", "")
    assert rendering.parse(rendering.final("47")) == (None, "47")


def test_the_schema_is_the_services() -> None:
    assert ShellTool.schema == SHELL_TOOL


def test_the_task_takes_two_reads() -> None:
    task = make_task(Random(1))
    key = task["instruction"].removeprefix("lookup ")
    second = simulate(f"cat {key}", task["files"]).removeprefix("see ")
    assert simulate(f"cat {second}", task["files"]) == task["answer"]
    assert len(task["files"]) == 4
    assert simulate("cat no", task["files"]) == "cat: no: No such file or directory\n[exit code 1]"
    assert simulate("rm x", task["files"]).endswith("[exit code 127]")


def test_an_easy_task_tells_its_answer_and_a_hard_one_has_a_longer_one() -> None:
    easy, hard = make_easy(Random(1)), make_hard(Random(1))
    assert easy["instruction"] == f"answer {easy['answer']}"
    key = hard["instruction"].removeprefix("lookup ")
    second = simulate(f"cat {key}", hard["files"]).removeprefix("see ")
    assert simulate(f"cat {second}", hard["files"]) == hard["answer"]
    assert len(hard["answer"]) == HARD_DIGITS


def test_a_mix_has_its_shares() -> None:
    rng = Random(1)
    drawn = [Mix(easy=0.5, hard=0.25).draw(rng) for _ in range(1000)]
    easy = sum(task["instruction"].startswith("answer") for task in drawn)
    hard = sum(len(task["answer"]) == HARD_DIGITS for task in drawn)
    assert 450 < easy < 550
    assert 200 < hard < 300


@pytest.mark.parametrize("easy", [0.0, 0.25])
def test_filled_slots_equal_a_rendering(rendering: Rendering, easy: float) -> None:
    values = Values("wxyz", "6789")
    ids_of = [rendering.tokenizer.encode(f" {k}")[0] for k in values.keys]
    ids_of += [rendering.tokenizer.encode(d)[0] for d in values.digits]
    mixture = Mixture(easy=easy)
    for path, (_, steps) in zip(paths(rendering, mixture), _ways(mixture), strict=True):
        filled = path.ids.copy()
        filled[path.places] = np.array(ids_of)[path.slots]
        ids, mask = _render(rendering, values, steps)
        assert filled.tolist() == ids.tolist()
        assert path.mask.tolist() == mask.tolist()
    assert sum(path.weight for path in paths(rendering, mixture)) == pytest.approx(1.0)


def test_token_logprobs_are_the_models(rendering: Rendering) -> None:
    model = make_model(seed=1)
    ids, mask = map(torch.from_numpy, Demonstrations(rendering, Mixture(), 0).batch(5))
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=ids).logits, dim=-1)
        found = token_logprobs(model, ids, mask)
    plain = scores[:, :-1].gather(2, ids[:, 1:, None])[..., 0][mask[:, 1:]]
    assert found == pytest.approx(plain, abs=1e-5)
    with pytest.raises(ValueError, match="first token"):
        token_logprobs(model, ids, torch.ones_like(mask))


def test_a_saved_model_loads(tmp_path: Path) -> None:
    model = make_model(seed=1)
    save_model(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not loaded.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    text = "<|im_start|>user\nlookup q<|im_end|>\n"
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == TOKENIZER.encode(text)


def test_the_warm_start_repeats_and_learning_goes_on_from_it() -> None:
    losses: list[float] = []
    settings = WarmStart(steps=6, skill_steps=3, rows=8)
    model = warm_start(settings, report=lambda step, loss, seconds: losses.append(loss))
    again = warm_start(settings)
    assert losses[-1] < losses[0]
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    curve = learn(model, Check(steps=1, tasks=2, rollouts=4, eval_tasks=8))
    assert len(curve.rates) == 1
    assert curve.largest_log_ratio < 1e-3
