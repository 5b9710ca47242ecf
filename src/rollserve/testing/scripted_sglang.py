"""The scripted policy on SGLang's routes, as its source (0.5) has them: for tests of the adapter.

What it follows: ``/generate`` with ``input_ids``; events that repeat all tokens, or with ``incremental``
only the new ones; ``output_token_logprobs`` as ``[logprob, id, null]``; ``finish_reason`` as an object; an
abort of every request whose ``rid`` begins with the one given; prompt and ``max_new_tokens`` below the
context length; logprobs after temperature, before truncation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rollserve.backend.base import GenerateRequest
from rollserve.errors import ContextTooLong, InvalidInput
from rollserve.records.call import SamplingParams
from rollserve.testing.asgi import Receive, Scope, Send, answer, send_body
from rollserve.testing.scripted import Chunk, ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp

_COLD = 0.05


class SglangSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    sampling_seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class SglangGenerate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rid: str
    input_ids: list[int]
    sampling_params: SglangSampling = SglangSampling()
    return_logprob: bool = False
    logprob_start_len: int = -1
    return_prompt_token_ids: bool = False
    stream: bool = False
    routing_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None


class SglangAbort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rid: str = ""
    abort_all: bool = False


class SglangPause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class SglangVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    new_version: str
    abort_all_requests: bool = True


@dataclass(frozen=True)
class _Encode:
    """``scale`` is what temperature leaves of a logprob; ``incremental`` events hold new tokens only."""

    scale: float
    incremental: bool
    reports_spans: bool

    def __call__(self, chunks: list[Chunk], rid: str, model: str, prompt: list[int] | None) -> bytes:
        total = sum(len(chunk.token_ids) for chunk in chunks)
        shown = chunks[-1:] if self.incremental else chunks
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": _reason(chunks[-1], total),
            "completion_tokens": total,
            "weight_version": chunks[-1].label or "default",
            "output_token_logprobs": [
                [logprob * self.scale, token_id, None]
                for chunk in shown
                for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
            ],
            "output_token_logprobs_length": total,
        }
        if self.reports_spans:
            meta["weight_versions"] = _spans(chunks)
        ids = [token_id for chunk in shown for token_id in chunk.token_ids]
        body: dict[str, Any] = {"text": None, "output_ids": ids, "meta_info": meta}
        if prompt is not None:
            body["prompt_token_ids"] = prompt
        return msgspec.json.encode(body)


def _reason(chunk: Chunk, total: int) -> dict[str, Any] | None:
    if chunk.finish_reason is None:
        return None
    more: dict[str, dict[str, Any]] = {
        "stop": {"matched": chunk.token_ids[-1] if chunk.token_ids else None},
        "length": {"length": total},
        "abort": {"message": "Aborted by AbortReq.", "status_code": None, "err_type": None},
    }
    return {"type": chunk.finish_reason, **more[chunk.finish_reason]}


def _spans(chunks: list[Chunk]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    at = 0
    for chunk in chunks:
        end, version = at + len(chunk.token_ids), chunk.label or "default"
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = end
        else:
            spans.append({"version": version, "start": at, "end": end})
        at = end
    return spans


def _no_adapters(name: str) -> AbstractContextManager[None]:
    raise InvalidInput(f"LoRA adapter '{name}' was requested, but LoRA is not enabled.")


class SglangApp(ScriptedApp):
    """``reports_spans`` False is a server that tells only the version of its weights now. ``asked`` are
    the last bodies of ``/generate``. ``use_adapter`` is entered for a call that wants one."""

    def __init__(
        self, engine: ScriptedEngine, *, incremental: bool = False, reports_spans: bool = True
    ) -> None:
        super().__init__(engine)
        engine.logprobs_mode = "raw"
        self.incremental = incremental
        self.reports_spans = reports_spans
        self.original_logprobs = False
        self.asked: list[SglangGenerate] = []
        self.pauses: list[str] = []
        self.use_adapter: Callable[[str], AbstractContextManager[None]] = _no_adapters
        self._routes = {
            "/generate": self._native,
            "/abort_request": self._abort_prefix,
            "/v1/models": self._listed,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/health": self._health,
            "/metrics": self._gauges,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._resume,
            "/flush_cache": self._flush,
            "/update_weight_version": self._version,
        }

    async def _native(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        asked = msgspec.json.decode(body, type=SglangGenerate)
        self.asked.append(asked)
        self._check_length(asked)
        with nullcontext() if asked.lora_path is None else self.use_adapter(asked.lora_path):
            await self._answered(asked, receive, send)

    async def _answered(self, asked: SglangGenerate, receive: Receive, send: Send) -> None:
        if asked.sampling_params.max_new_tokens == 0:
            await send_body(send, 200, self._scored(asked))
            return
        sampling = asked.sampling_params
        cold = sampling.temperature < _COLD and sampling.top_k != 1 and not self.original_logprobs
        encode = _Encode(
            scale=sampling.temperature if cold else 1.0,
            incremental=self.incremental and asked.stream,
            reports_spans=self.reports_spans,
        )
        await self._run(self._generate_request(asked), asked.stream, encode, receive, send)

    def _check_length(self, asked: SglangGenerate) -> None:
        context, given = self.engine.context_tokens, len(asked.input_ids)
        if given >= context:
            raise ContextTooLong(
                f"The input ({given} tokens) is longer than the model's context length ({context} tokens)."
            )
        if given + asked.sampling_params.max_new_tokens >= context:
            raise InvalidInput(
                f"Requested token count exceeds the model's maximum context length of {context} tokens."
            )

    def _generate_request(self, asked: SglangGenerate) -> GenerateRequest:
        sampling = asked.sampling_params
        return GenerateRequest(
            request_id=asked.rid,
            model=asked.lora_path or self.engine.model,
            token_ids=asked.input_ids,
            sampling=SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                seed=sampling.sampling_seed,
                stop_token_ids=sampling.stop_token_ids,
            ),
            cache_salt=asked.cache_salt or "",
            session_id=asked.routing_key or "",
        )

    def _scored(self, asked: SglangGenerate) -> bytes:
        """``logprob_start_len`` -1 is the end of the prompt: no logprob of it."""
        ids = asked.input_ids
        values: list[float | None] = [None, *self.engine.score(ids)]
        entries = [[value, token_id, None] for value, token_id in zip(values, ids, strict=True)]
        start = asked.logprob_start_len if asked.logprob_start_len >= 0 else len(ids)
        meta = {
            "id": asked.rid,
            "finish_reason": {"type": "length", "length": 0},
            "completion_tokens": 0,
            "input_token_logprobs": entries[start:],
            "output_token_logprobs": [],
        }
        return msgspec.json.encode({"text": "", "output_ids": [], "meta_info": meta})

    async def _abort_prefix(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        asked = msgspec.json.decode(body, type=SglangAbort)
        running = [rid for rid in self.engine.running if asked.abort_all or rid.startswith(asked.rid)]
        self.engine.abort(running)
        await send_body(send, 200, b"")

    async def _pause_generation(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Of its modes *retract* and *in_place* leave what runs standing; none waits."""
        if scope["method"] != "POST":
            await answer(send, 405, {"detail": "Method Not Allowed"})
            return
        mode = msgspec.json.decode(body, type=SglangPause).mode
        self.pauses.append(mode)
        await self.engine.pause("abort" if mode == "abort" else "keep")
        await answer(send, 200, {"message": "Generation paused successfully.", "status": "ok"})

    async def _flush(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Refused while something runs in place."""
        if self.engine.running and self.pauses[-1:] != ["retract"]:
            await answer(send, 400, {"message": "Flush cache failed: requests are running."})
            return
        await self._reset(scope, body, receive, send)

    async def _version(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        asked = msgspec.json.decode(body, type=SglangVersion)
        if asked.abort_all_requests:
            self.engine.abort(list(self.engine.running))
        self.engine.label = asked.new_version
        await answer(send, 200, {"success": True, "new_version": asked.new_version})

    async def _listed(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        model = {
            "id": self.engine.model,
            "owned_by": "sglang",
            "root": self.engine.model,
            "parent": None,
            "max_model_len": self.engine.context_tokens,
        }
        adapters = [
            {**model, "id": name, "root": path, "parent": self.engine.model, "max_model_len": None}
            for name, path in self.engine.adapters.items()
        ]
        await answer(send, 200, {"object": "list", "data": [model, *adapters]})

    async def _model_info(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        about = {"model_path": "/models/m", "is_generation": True, "weight_version": self.engine.label}
        await answer(send, 200, about)

    async def _server_info(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        await answer(send, 200, {"version": "0.5.23", "incremental_streaming_output": self.incremental})

    async def _gauges(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        labels = f'{{engine_type="unified",model_name="{self.engine.model}"}}'
        running = f"sglang:num_running_reqs{labels} {len(self.engine.running)}.0\n"
        text = f"{running}sglang:num_queue_reqs{labels} 0.0\n"
        await send_body(send, 200, text.encode())
