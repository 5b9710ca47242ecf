"""The bodies that the scripted server reads and writes, as vLLM 0.32 has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rollserve.testing.scripted import Chunk


class Sampling(msgspec.Struct, frozen=True):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None


class Generate(msgspec.Struct, frozen=True):
    token_ids: msgspec.Raw
    sampling_params: Sampling = Sampling()
    request_id: str = ""
    model: str | None = None
    stream: bool = False
    cache_salt: str | None = None


class Complete(Sampling, frozen=True, kw_only=True):
    prompt: list[int]
    model: str | None = None
    stream: bool = False
    echo: bool = False


class Ids(msgspec.Struct, frozen=True):
    request_ids: list[str]


class Label(msgspec.Struct, frozen=True):
    new_version: str


class Adapter(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str = ""


Encode = Callable[[list[Chunk], str, str, list[int] | None], bytes]
"""Chunks so far, request id, model, prompt ids to echo → a body, or the event of the last chunk."""


def choice_of(chunk: Chunk, before: int) -> dict[str, Any]:
    content = [
        {"token_id": token_id, "logprob": logprob, "rank": 1, "top_logprobs": []}
        for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": chunk.finish_reason,
        "stop_reason": None,
        "token_ids": chunk.token_ids,
        "logprobs": {"content": content},
    }
    if chunk.label is not None:
        end = before + len(chunk.token_ids)
        choice["weight_versions"] = [{"version": chunk.label, "start": before, "end": end}]
    return choice


def _generation(choice: dict[str, Any], request_id: str, model: str, prompt_ids: list[int] | None) -> bytes:
    return msgspec.json.encode(
        {
            "request_id": f"generate-tokens-{request_id}",
            "model": model,
            "choices": [choice],
            "prompt_token_ids": prompt_ids,
        }
    )


def encode_stream(chunks: list[Chunk], request_id: str, model: str, prompt: list[int] | None) -> bytes:
    before = sum(len(chunk.token_ids) for chunk in chunks[:-1])
    return _generation(choice_of(chunks[-1], before), request_id, model, prompt)


def encode_whole(chunks: list[Chunk], request_id: str, model: str, prompt: list[int] | None) -> bytes:
    choice = choice_of(_joined(chunks), 0)
    if "weight_versions" in choice or any(chunk.label is not None for chunk in chunks):
        spans, at = [], 0
        for chunk in chunks:
            end = at + len(chunk.token_ids)
            spans.append({"version": chunk.label, "start": at, "end": end})
            at = end
        choice["weight_versions"] = spans
    return _generation(choice, request_id, model, prompt)


def score_of(prompt: list[int], logprobs: list[float]) -> list[dict[str, Any] | None]:
    """As vLLM has ``prompt_logprobs``."""
    rest = zip(prompt[1:], logprobs, strict=True)
    return [None, *({str(token_id): {"logprob": value, "rank": 1}} for token_id, value in rest)]


def encode_scored(prompt: list[int], logprobs: list[float], model: str) -> bytes:
    choice = {"index": 0, "finish_reason": "length", "token_ids": [], "logprobs": {"content": []}}
    scored = score_of(prompt, logprobs)
    return msgspec.json.encode(
        {"model": model, "choices": [choice], "prompt_token_ids": prompt, "prompt_logprobs": scored}
    )


def encode_echoed(prompt: list[int], logprobs: list[float]) -> bytes:
    """The prompt and no token more."""
    tokens = [f"<{token_id}>" for token_id in prompt]
    given = {"tokens": tokens, "token_logprobs": [None, *logprobs]}
    choice = {"index": 0, "text": "".join(tokens), "finish_reason": "length", "token_ids": [],
              "prompt_token_ids": prompt, "logprobs": given}  # fmt: skip
    return msgspec.json.encode({"object": "text_completion", "choices": [choice]})


def _joined(chunks: list[Chunk]) -> Chunk:
    return Chunk(
        [token_id for chunk in chunks for token_id in chunk.token_ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        None,
        chunks[-1].finish_reason,
    )


def encode_completion(chunks: list[Chunk], request_id: str, model: str, prompt: list[int] | None) -> bytes:
    joined = _joined(chunks)
    choice = {
        "index": 0,
        "text": "".join(f"<{token_id}>" for token_id in joined.token_ids),
        "finish_reason": joined.finish_reason,
        "token_ids": joined.token_ids,
        "prompt_token_ids": prompt,
        "logprobs": {
            "tokens": [f"<{token_id}>" for token_id in joined.token_ids],
            "token_logprobs": joined.logprobs,
            "top_logprobs": [{} for _ in joined.token_ids],
            "text_offset": [0 for _ in joined.token_ids],
        },
    }
    return msgspec.json.encode({"id": request_id, "object": "text_completion", "choices": [choice]})


def encode_completion_event(
    chunks: list[Chunk], request_id: str, model: str, prompt: list[int] | None
) -> bytes:
    return encode_completion(chunks[-1:], request_id, model, prompt)
