"""Bodies of the routes, as vLLM 0.32 names them, and what of them this server can honour.

A parameter that would change the answer and is not implemented is refused by name: an answer sampled
from another distribution than the one asked for would poison the learner silently.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from rollserve.errors import InvalidInput, nearest

Mode = Literal["keep", "wait", "abort"]
T = TypeVar("T")

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`")


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's sampling parameters. Those below the line are accepted only at their neutral value."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # ── accepted at their neutral value only
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | str | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    # ── concern text only, and this server makes none
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"
    cache_salt: str | None = None
    priority: int = 0


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_ids: list[str]


class AbortAnyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Without ids, everything in flight is meant."""

    request_ids: list[str] | None = None


class UpdateWeightsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``model_path`` is a ``.safetensors`` file or a Hugging Face directory that holds some."""

    model_path: str
    weight_version: str | int | None = None
    mode: Mode = "keep"


class WeightVersionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    new_version: str | int


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    rank: int


class Logprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class VersionSpan(msgspec.Struct):
    """Sampled tokens ``start:end`` (offsets into all sampled ids of the request) have this version."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    index: int
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | None
    token_ids: list[int]
    logprobs: Logprobs | None
    weight_versions: list[VersionSpan]


class PromptLogprob(msgspec.Struct, frozen=True):
    """Of the model's own distribution (temperature 1), given the tokens before."""

    logprob: float


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateAnswer(msgspec.Struct, frozen=True):
    """The whole answer, or one event of a stream: then only the first event has ``prompt_token_ids``
    and ``prompt_logprobs`` (by token id, null at the first token), and only the last has ``usage`` and
    the weight versions of all tokens."""

    request_id: str
    model: str
    created: int
    choices: list[Choice]
    prompt_token_ids: list[int] | None
    usage: Usage | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


def decode(body: bytes, shape: type[T]) -> T:
    """Decode a JSON body, or raise ``InvalidInput`` that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _named(str(error), shape) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}", field="body") from None


def _named(message: str, shape: type) -> InvalidInput:
    place = _PLACE.search(message)
    path = place["path"] if place else ""
    text = _PLACE.sub("", message)
    unknown = _UNKNOWN.match(message)
    if unknown is None:
        return InvalidInput(text, field=path or None)
    name = unknown["name"]
    owner: type = SamplingParams if path == "sampling_params" else shape
    hint = nearest(name, [field.name for field in msgspec.structs.fields(owner)], cutoff=0.6)
    return InvalidInput(f"unknown parameter {name!r}", field=f"{path}.{name}".lstrip("."), hint=hint)


def check_sampling(params: SamplingParams) -> None:
    """Refuse what is out of range or not supported, by name."""
    for name, value, neutral in _neutral_only(params):
        if value not in neutral:
            raise _refuse(name, f"{value!r} is not supported by this server")
    ranges = (
        ("temperature", 0.0 <= params.temperature <= 100.0, "from 0 to 100"),
        ("top_p", 0.0 < params.top_p <= 1.0, "above 0, up to 1"),
        ("top_k", params.top_k >= -1, "0 or -1 for all tokens, or a count"),
        ("min_p", 0.0 <= params.min_p <= 1.0, "from 0 to 1"),
        ("max_tokens", params.max_tokens is None or params.max_tokens >= 1, "at least 1"),
        ("min_tokens", params.min_tokens >= 0, "at least 0"),
        ("logprobs", params.logprobs in (None, 0, 1), "null, 0 or 1: only the sampled token's is given"),
        ("prompt_logprobs", params.prompt_logprobs in (None, 0), "null or 0: only the prompt's tokens' are"),
    )
    for name, fine, wanted in ranges:
        if not fine:
            raise _refuse(name, f"{getattr(params, name)!r} is out of range: must be {wanted}")


def _neutral_only(params: SamplingParams) -> tuple[tuple[str, object, tuple[object, ...]], ...]:
    return (
        ("n", params.n, (1,)),
        ("best_of", params.best_of, (None, 1)),
        ("presence_penalty", params.presence_penalty, (0.0,)),
        ("frequency_penalty", params.frequency_penalty, (0.0,)),
        ("repetition_penalty", params.repetition_penalty, (1.0,)),
        ("stop", params.stop, (None, [], "")),
        ("logit_bias", params.logit_bias, (None, {})),
        ("allowed_token_ids", params.allowed_token_ids, (None,)),
        ("bad_words", params.bad_words, (None, [])),
        ("structured_outputs", params.structured_outputs, (None,)),
        ("extra_args", params.extra_args, (None, {})),
        ("truncate_prompt_tokens", params.truncate_prompt_tokens, (None,)),
    )


def _refuse(name: str, message: str) -> InvalidInput:
    return InvalidInput(message, field=f"sampling_params.{name}")
