"""The routes, over a real socket."""

from __future__ import annotations

import asyncio
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollserve.backend.http import Http
from rollserve.backend.vllm import VllmBackend

from .conftest import Client, eventually

GENERATE = "/inference/v1/generate"


async def test_answer_has_vllms_shape(client: Client) -> None:
    answer = await client.generate([1, 2, 3], request_id="mine", max_tokens=4, seed=1)
    (choice,) = answer["choices"]
    assert answer["request_id"] == "mine"
    assert answer["model"] == "tiny"
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["weight_versions"] == [{"version": "v0", "start": 0, "end": 4}]


async def test_logprobs_only_when_asked(client: Client) -> None:
    answer = await client.generate([1], max_tokens=2, logprobs=None)
    assert answer["choices"][0]["logprobs"] is None


async def test_stream_adds_up_to_the_answer(client: Client) -> None:
    whole = await client.generate([5, 6], max_tokens=7, seed=3)
    params = {"max_tokens": 7, "seed": 3, "logprobs": 0}
    body = {"token_ids": [5, 6], "stream": True, "sampling_params": params}
    async with client.http.post(GENERATE, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [event["choices"][0] for event in events]
    (expected,) = whole["choices"]
    assert [i for choice in choices for i in choice["token_ids"]] == expected["token_ids"]
    content = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [e["logprob"] for e in content] == pytest.approx(
        [e["logprob"] for e in expected["logprobs"]["content"]], abs=1e-5
    )
    assert [event["prompt_token_ids"] for event in events] == [[5, 6], *[None] * 6]
    assert [choice["finish_reason"] for choice in choices] == [*[None] * 6, "length"]
    spans = [choice["weight_versions"] for choice in choices]
    assert spans[:-1] == [[{"version": "v0", "start": i, "end": i + 1}] for i in range(6)]
    assert spans[-1] == [{"version": "v0", "start": 0, "end": 7}]
    assert events[-1]["usage"]["completion_tokens"] == 7


async def test_64_requests_at_once(client: Client) -> None:
    prompts = [[(7 * i + j) % 300 for j in range(1 + i % 40)] for i in range(64)]
    alone = [await client.generate(p, max_tokens=9, seed=i) for i, p in enumerate(prompts[:4])]
    answers = await asyncio.gather(
        *(client.generate(p, max_tokens=5 + i % 6, seed=i) for i, p in enumerate(prompts))
    )
    for i, answer in enumerate(answers):
        assert answer["prompt_token_ids"] == prompts[i]
        assert len(answer["choices"][0]["token_ids"]) == 5 + i % 6
    for one, other in zip(alone, answers, strict=False):
        ids = other["choices"][0]["token_ids"]
        assert one["choices"][0]["token_ids"][: len(ids)] == ids


async def test_abort_ends_with_the_partial_answer(client: Client) -> None:
    waiting = asyncio.create_task(client.generate([1], request_id="long", max_tokens=500))
    await client.until_running(1)
    status, body = await client.post("/inference/v1/abort_requests", {"request_ids": ["long", "other"]})
    assert (status, body) == (200, {"status": "aborted", "aborted": ["long"], "not_found": ["other"]})
    (choice,) = (await waiting)["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 500
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_abort_of_everything(client: Client) -> None:
    waiting = [asyncio.create_task(client.generate([1], max_tokens=500)) for _ in range(3)]
    await client.until_running(3)
    assert len((await client.post("/abort_requests", {}))[1]["aborted"]) == 3
    assert {(await one)["choices"][0]["finish_reason"] for one in waiting} == {"abort"}


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts(client: Client, stream: bool) -> None:
    body = {"token_ids": [1], "stream": stream, "sampling_params": {"max_tokens": 500}}
    call = asyncio.create_task(client.post(GENERATE, body))
    await client.until_running(1)
    call.cancel()
    await eventually(lambda: not client.server.engine.running)
    assert client.server.engine.counters.aborted == 1
    assert client.server.engine.counters.generated_tokens < 500


async def test_update_in_mid_generation(client: Client, other_dir: Path) -> None:
    running = asyncio.create_task(client.generate([4, 5], max_tokens=400, seed=1))
    await client.until_running(1)
    update = {"model_path": str(other_dir), "weight_version": 1}
    status, body = await client.post("/update_weights_from_disk", update)
    assert (status, body["success"], body["weight_version"]) == (200, True, "1")
    (choice,) = (await running)["choices"]
    first, second = choice["weight_versions"]
    assert (first["version"], second["version"]) == ("v0", "1")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], 400)
    after = await client.generate([4, 5], max_tokens=6, temperature=0)
    model = AutoModelForCausalLM.from_pretrained(other_dir, dtype=torch.float32)
    assert logprobs(after) == pytest.approx(plain_logprobs(model, after), abs=1e-4)
    assert (await client.get("/server_info"))["weight_version"] == "1"


def logprobs(answer: Any) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def plain_logprobs(model: torch.nn.Module, answer: Any) -> list[float]:
    prompt, sampled = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=torch.tensor([prompt + sampled])).logits[0], dim=-1)
    return [float(scores[len(prompt) + i - 1, token]) for i, token in enumerate(sampled)]


async def test_update_that_aborts(client: Client, other_dir: Path) -> None:
    running = asyncio.create_task(client.generate([4, 5], max_tokens=500))
    await client.until_running(1)
    update = {"model_path": str(other_dir), "weight_version": "v1", "mode": "abort"}
    status, _ = await client.post("/update_weights_from_disk", update)
    (choice,) = (await running)["choices"]
    assert (status, choice["finish_reason"]) == (200, "abort")
    assert {span["version"] for span in choice["weight_versions"]} == {"v0"}


async def test_update_that_waits(client: Client, other_dir: Path) -> None:
    running = asyncio.create_task(client.generate([4, 5], max_tokens=60))
    await client.until_running(1)
    update = {"model_path": str(other_dir), "weight_version": "v1", "mode": "wait"}
    waiting = asyncio.create_task(client.post("/update_weights_from_disk", update))
    (choice,) = (await running)["choices"]
    assert choice["weight_versions"] == [{"version": "v0", "start": 0, "end": 60}]
    assert (await waiting)[0] == 200
    assert (await client.generate([1], max_tokens=1))["choices"][0]["weight_versions"][0]["version"] == "v1"


async def test_bad_weights_leave_the_old_ones(client: Client, model_dir: Path, tmp_path: Path) -> None:
    before = await client.generate([1, 2], max_tokens=5, temperature=0)
    tensors = load_file(model_dir / "model.safetensors")
    tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
    save_file(tensors, tmp_path / "bad.safetensors")
    update = {"model_path": str(tmp_path / "bad.safetensors"), "weight_version": "v1"}
    status, body = await client.post("/update_weights_from_disk", update)
    assert status == 400
    assert "lm_head.weight" in body["error"]["message"]
    assert body["error"]["param"] == "model_path"
    after = await client.generate([1, 2], max_tokens=5, temperature=0)
    assert after["choices"] == before["choices"]


async def test_pause_keep_freezes_until_resume(client: Client) -> None:
    running = asyncio.create_task(client.generate([1], max_tokens=400))
    await client.until_running(1)
    assert (await client.post("/pause?mode=keep"))[0] == 200
    frozen = client.server.engine.counters.generated_tokens
    queued = asyncio.create_task(client.generate([2], max_tokens=3))
    await asyncio.sleep(0.05)
    assert (await client.get("/is_paused")) == {"is_paused": True}
    assert client.server.engine.counters.generated_tokens == frozen
    assert (await client.post("/update_weight_version", {"new_version": "v1"}))[0] == 200
    assert (await client.get("/weight_info")) == {"weight_version": "v1"}
    await client.post("/resume")
    versions = [span["version"] for span in (await running)["choices"][0]["weight_versions"]]
    assert versions == ["v0", "v1"]
    assert (await queued)["choices"][0]["finish_reason"] == "length"
    assert (await client.get("/is_paused")) == {"is_paused": False}


async def test_pause_aborts_by_default(client: Client) -> None:
    running = asyncio.create_task(client.generate([1], max_tokens=500))
    await client.until_running(1)
    assert await client.post("/pause") == (200, {"status": "paused", "mode": "abort"})
    assert (await running)["choices"][0]["finish_reason"] == "abort"


async def test_pause_may_wait(client: Client) -> None:
    running = asyncio.create_task(client.generate([1], max_tokens=300))
    await client.until_running(1)
    assert (await client.post("/pause?mode=wait"))[0] == 200
    assert (await running)["choices"][0]["finish_reason"] == "length"
    assert client.server.engine.running == []


@pytest.mark.parametrize(
    ("change", "status", "param", "text"),
    [
        ({"sampling_params": {"max_token": 3}}, 400, "sampling_params.max_token", "max_tokens"),
        ({"sampling_params": {"stop": ["x"]}}, 400, "sampling_params.stop", "not supported"),
        ({"sampling_params": {"n": 2}}, 400, "sampling_params.n", "not supported"),
        ({"sampling_params": {"logprobs": 5}}, 400, "sampling_params.logprobs", "sampled token"),
        ({"sampling_params": {"repetition_penalty": 1.1}}, 400, "sampling_params.repetition_penalty", "1.1"),
        ({"sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature", "from 0"),
        ({"sampling_params": {"top_p": 0}}, 400, "sampling_params.top_p", "above 0"),
        ({"sampling_params": {"max_tokens": "5"}}, 400, "sampling_params.max_tokens", "int"),
        ({"sampling_params": {"stop_token_ids": [300]}}, 400, "sampling_params.stop_token_ids", "299"),
        ({"token_ids": []}, 400, "token_ids", "at least one"),
        ({"token_ids": [1, 300]}, 400, "token_ids", "299"),
        ({"token_ids": [1] * 512}, 400, "token_ids", "max_model_len=512"),
        ({"model": "other"}, 404, "model", "'tiny'"),
        ({"surprise": 1}, 400, "surprise", "unknown parameter"),
    ],
)
async def test_bad_requests_are_named(
    client: Client, change: dict[str, Any], status: int, param: str, text: str
) -> None:
    got, body = await client.post(GENERATE, {"token_ids": [1], **change})
    assert got == status
    assert body["error"]["param"] == param
    assert text in body["error"]["message"]


async def test_bodies_that_are_no_json_or_too_large(client: Client) -> None:
    for data, status in ((b"{", 400), (b"[" * 100_000, 400), (b" " * (1 << 20) + b"{}", 413)):
        async with client.http.post(GENERATE, data=BytesIO(data)) as response:
            assert response.status == status
            assert (await response.json())["error"]["param"] in ("body", None)


async def test_answer_ends_at_the_context(client: Client) -> None:
    answer = await client.generate([1] * 500, max_tokens=100)
    assert len(answer["choices"][0]["token_ids"]) == 12
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_about_the_server(client: Client) -> None:
    await client.generate([1, 2], max_tokens=3)
    (model,) = (await client.get("/v1/models"))["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 512)
    info = await client.get("/server_info")
    assert (info["engine"], info["logprobs_mode"]) == ("rollserve-local", "processed_logprobs")
    assert (await client.post("/reset_prefix_cache"))[0] == 200
    async with client.http.get("/health") as response:
        assert response.status == 200
    async with client.http.get("/metrics") as response:
        text = await response.text()
    assert 'vllm:generation_tokens_total{model_name="tiny"} 3.0' in text
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in text


async def test_its_count_of_tokens_moves_while_it_samples(client: Client) -> None:
    async with client.http.get("/health") as response:
        backend = VllmBackend(Http(str(response.url.origin())), "tiny")
    counts: list[int | None] = []

    async def look() -> bool:
        counts.append((await backend.health()).generated_tokens)
        return len(set(counts)) >= 3

    running = asyncio.create_task(client.generate([1, 2], max_tokens=400))
    async with asyncio.timeout(30):
        while not await look():
            await asyncio.sleep(0)
    await running
    assert None not in counts
    assert max(count or 0 for count in counts) <= 400
    await backend.close()


async def test_prompt_logprobs_are_the_models_own(client: Client, model_dir: Path) -> None:
    """Over several chunks of the prompt, and beside one that runs."""
    reference = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32)
    ids = [7 + at * 13 % 250 for at in range(150)]
    other = asyncio.create_task(client.generate([1, 2, 3], max_tokens=60))
    answer = await client.generate(ids, max_tokens=1, prompt_logprobs=0, temperature=0.3)
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(input_ids=torch.tensor([ids])).logits[0].float(), dim=-1)
    wanted = [logprobs[at, token_id].item() for at, token_id in enumerate(ids[1:])]
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert [list(each) for each in rest] == [[str(token_id)] for token_id in ids[1:]]
    given = [each[str(token_id)]["logprob"] for each, token_id in zip(rest, ids[1:], strict=True)]
    assert given == pytest.approx(wanted, abs=1e-3)
    alone = await client.generate([1, 2, 3], max_tokens=60, temperature=0)
    assert len((await other)["choices"][0]["token_ids"]) == len(alone["choices"][0]["token_ids"])
    assert (await client.generate(ids, max_tokens=1))["prompt_logprobs"] is None


async def test_only_the_prompts_own_tokens_are_scored(client: Client) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"prompt_logprobs": 5}}
    status, answer = await client.post(GENERATE, body)
    assert status == 400
    assert answer["error"]["param"] == "sampling_params.prompt_logprobs"
