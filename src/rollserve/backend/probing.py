"""What every probe asks: is this a model server, does it serve the model, which engine is it."""

from __future__ import annotations

from typing import Any

import msgspec

from rollserve.backend.base import BackendHealth
from rollserve.backend.http import MAX_MODELS_BYTES, MAX_SAID_BYTES, Answer, Http
from rollserve.backend.refusals import describe, message_of
from rollserve.errors import BackendError, BackendUnavailable, InvalidInput, nearest

RAW_LOGPROBS = (
    "logprobs are those before temperature, top_p and top_k: right only at temperature 1 without "
    "truncation; for anything else start the server with --logprobs-mode processed_logprobs"
)
NO_TOKENS = (
    "gives text and no token ids: samples are text only (exact is False, cause no_tokens), and nothing is "
    "trained on them"
)
NO_VERSIONS = "reports no weight versions: those of sampled tokens are inferred from the policy's"


ENGINES = (
    "The URL is the root of an inference server: `vllm serve MODEL --enable-scale-out` (kind vllm), "
    "`python -m rollserve.localserver --model FOLDER` (local), "
    "`python -m sglang.launch_server --model-path MODEL` (sglang), "
    "or any that has GET /v1/models and, for token ids, POST /v1/completions (openai) "
    "or /v1/chat/completions (chat, text)"
)
UNREACHED = (
    "Is it up (an engine that loads its model answers late), and is the address right as seen from here? "
)


class Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    owned_by: str | None = None
    parent: str | None = None
    meta: dict[str, Any] | None = None

    @property
    def context_tokens(self) -> int | None:
        """vLLM's and SGLang's field, or llama.cpp's."""
        trained = (self.meta or {}).get("n_ctx")
        return self.max_model_len or (trained if isinstance(trained, int) else None)


class _Models(msgspec.Struct, frozen=True):
    data: list[Model]


async def listed_models(http: Http) -> list[Model]:
    """What ``/v1/models`` lists. Raises ``InvalidInput``: field ``url`` when what answers is no such
    server, ``api_key`` when it wants one."""
    answer = await ask(http, "/v1/models", max_bytes=MAX_MODELS_BYTES)
    if _is_rollserve(answer):
        raise InvalidInput(
            f"{http.url} is a rollserve server, which has no model of its own", field="url", hint=ENGINES
        )
    if answer.status in (401, 403):
        raise InvalidInput(f"{http.url} refused the key: {message_of(answer)}", field="api_key")
    if answer.status != 200:
        raise _no_server(http, answer)
    try:
        return msgspec.json.decode(answer.body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _no_server(http, answer) from None


def _no_server(http: Http, answer: Answer) -> InvalidInput:
    message = f"no inference server at {http.url}: /v1/models gave {describe(answer)}"
    return InvalidInput(message, field="url", hint=ENGINES)


def _is_rollserve(answer: Answer) -> bool:
    """By the errors of its API, whichever this one is."""
    return answer.content_type == "application/problem+json" and isinstance(_fields(answer).get("code"), str)


async def served_models(http: Http, model: str) -> list[Model]:
    """The listed models, ``model`` first. Raises ``InvalidInput`` (field ``model``) when the server has
    others, and as ``listed_models`` does."""
    models = await listed_models(http)
    names = [served.id for served in models]
    if model not in names:
        raise InvalidInput(
            f"{http.url} does not serve the model {model!r}; it serves: {', '.join(names) or 'none'}",
            field="model",
            hint=nearest(model, names, cutoff=0.4),
        )
    return sorted(models, key=lambda served: served.id != model)


async def looked_at(http: Http, model: str, health: BackendHealth) -> BackendHealth:
    """``health``, unless the server does not list the model."""
    if not health.ok:
        return health
    try:
        await served_models(http, model)
    except InvalidInput as error:
        return BackendHealth(ok=False, detail=error.message)
    return health


async def ask(http: Http, path: str, *, max_bytes: int = MAX_SAID_BYTES) -> Answer:
    """GET for a probe: a server that can't be reached, or says more than ``max_bytes``, is the caller's wrong
    address. Raises ``InvalidInput`` (field ``url``)."""
    try:
        return await http.get(path, max_bytes=max_bytes)
    except (BackendUnavailable, BackendError) as error:
        message = f"no inference server at {http.url}: {error.message}"
        raise InvalidInput(message, field="url", hint=UNREACHED + ENGINES) from error


async def engine_name(http: Http, default: str) -> str:
    """``rollserve-local``, ``vllm 0.32.0``, … as the server calls itself."""
    info = _object(await ask(http, "/server_info"))
    if isinstance(info.get("engine"), str):
        return str(info["engine"])
    version = _object(await ask(http, "/version")).get("version")
    version = version if isinstance(version, str) else info.get("version")
    return f"{default} {version}" if isinstance(version, str) else default


def _object(answer: Answer) -> dict[str, Any]:
    return _fields(answer) if answer.status == 200 else {}


def _fields(answer: Answer) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return body if isinstance(body, dict) else {}


def logprobs_mode(greedy_logprobs: list[float]) -> str:
    """From logprobs sampled with ``top_k=1``: of the distribution that was sampled they are exactly 0,
    of the model's they are not."""
    if not greedy_logprobs:
        return "unknown"
    return "processed" if max(abs(value) for value in greedy_logprobs) < 1e-6 else "raw"
