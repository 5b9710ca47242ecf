"""The routes. Bodies and names are vLLM 0.32's, so that one client adapter serves both servers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rollserve.errors import (
    ContextTooLong,
    InvalidInput,
    NotFound,
    RollserveError,
    TooLarge,
    Unavailable,
    UnknownName,
)
from rollserve.localserver import metrics
from rollserve.localserver.answers import EventStream, answer, or_disconnect, problem, until_disconnect
from rollserve.localserver.engine import Engine
from rollserve.localserver.model import BatchModel
from rollserve.localserver.request import (
    AbortAnyRequest,
    AbortRequest,
    GenerateRequest,
    Mode,
    UpdateWeightsRequest,
    WeightVersionRequest,
    check_sampling,
    decode,
)
from rollserve.localserver.sequence import Progress, Sequence
from rollserve.localserver.weights import check_checkpoint, load_weights, read_checkpoint
from rollserve.localserver.worker import EngineThread

LOGPROBS_MODE = "processed_logprobs"
_MODES: tuple[Mode, ...] = ("abort", "wait", "keep")
_CLIENT_GONE = 499
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    served_model_name: str
    weight_version: str = "default"
    max_waiting: int = 4096
    max_body_bytes: int = 64 * 2**20


class LocalServer:
    """The state behind the routes: one model, one engine thread, one mailbox per request in flight."""

    def __init__(self, model: BatchModel, settings: ServerSettings) -> None:
        self.model = model
        self.settings = settings
        self.engine = Engine(model, weight_version=settings.weight_version, max_waiting=settings.max_waiting)
        self.thread = EngineThread(self.engine, self._publish)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[Sequence, asyncio.Queue[Progress]] = {}
        self._created = int(time.time())
        self._updating = asyncio.Lock()

    @asynccontextmanager
    async def lifespan(self, app: ASGIApp) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self.thread.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.thread.stop)

    def _publish(self, reported: list[Progress]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, reported)

    def _deliver(self, reported: list[Progress]) -> None:
        for progress in reported:
            sequence = progress.sequence
            done = progress.finish_reason is not None
            mailbox = self._mailboxes.pop(sequence, None) if done else self._mailboxes.get(sequence)
            if mailbox is not None:
                mailbox.put_nowait(progress)

    # ── generate

    async def generate(self, request: Request) -> Response | EventStream:
        body = decode(await self._body(request), GenerateRequest)
        sequence = self._sequence(body)
        mailbox: asyncio.Queue[Progress] = asyncio.Queue()
        self._mailboxes[sequence] = mailbox
        try:
            await asyncio.wrap_future(self.thread.call(lambda: self.engine.submit(sequence)))
        except BaseException:
            self._abort(sequence)
            raise
        encode = partial(answer, model=self.name, created=int(time.time()))
        if sequence.streamed:
            return EventStream(sequence, mailbox, encode, self._abort)
        gone = asyncio.create_task(until_disconnect(request.receive))
        progress = None
        try:
            progress = await or_disconnect(mailbox.get(), gone)
        finally:
            gone.cancel()
            if progress is None:
                self._abort(sequence)
        if progress is None:
            return Response(status_code=_CLIENT_GONE)
        return _json(encode(progress))

    def _sequence(self, body: GenerateRequest) -> Sequence:
        """Check a request against the model, and make what the engine runs."""
        if body.model is not None and body.model != self.name:
            raise NotFound(f"the model {body.model!r} does not exist; served: {self.name!r}", field="model")
        params = body.sampling_params
        check_sampling(params)
        limit = self.model.max_model_len - len(body.token_ids)
        if limit < 1:
            raise ContextTooLong(
                f"the prompt has {len(body.token_ids)} tokens; prompt and answer together may have"
                f" max_model_len={self.model.max_model_len}",
                field="token_ids",
            )
        self._check_ids("token_ids", body.token_ids)
        self._check_ids("sampling_params.stop_token_ids", params.stop_token_ids or [])
        if not body.token_ids:
            raise InvalidInput("at least one token is needed", field="token_ids")
        return Sequence(
            request_id=body.request_id or f"generate-{uuid.uuid4().hex}",
            prompt_ids=body.token_ids,
            params=params,
            limit=min(limit, params.max_tokens or limit),
            eos_ids=frozenset() if params.ignore_eos else self.model.eos_ids,
            streamed=body.stream,
        )

    def _check_ids(self, field: str, ids: list[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.model.vocab_size):
            raise InvalidInput(f"ids must be from 0 to {self.model.vocab_size - 1}", field=field)

    def _abort(self, sequence: Sequence) -> None:
        self._mailboxes.pop(sequence, None)
        self.thread.post(lambda: self.engine.abort(lambda other: other is sequence))

    async def abort_requests(self, request: Request) -> Response:
        wanted = set(decode(await self._body(request), AbortRequest).request_ids)
        return await self._abort_all(lambda sequence: sequence.request_id in wanted, wanted)

    async def abort_any(self, request: Request) -> Response:
        wanted = set(decode(await self._body(request), AbortAnyRequest).request_ids or ())
        return await self._abort_all(lambda s: not wanted or s.request_id in wanted, wanted)

    async def _abort_all(self, matches: Callable[[Sequence], bool], wanted: set[str]) -> Response:
        found = await self._call(lambda: self.engine.abort(matches))
        aborted = {sequence.request_id for sequence in found}
        about = {"status": "aborted", "aborted": sorted(aborted), "not_found": sorted(wanted - aborted)}
        return _json(about)

    # ── weights

    async def update_weights(self, request: Request) -> Response:
        body = decode(await self._body(request), UpdateWeightsRequest)
        started = time.monotonic()
        async with self._updating:
            tensors = await asyncio.to_thread(read_checkpoint, body.model_path)
            await asyncio.to_thread(check_checkpoint, self.model.module, tensors)
            version = self.engine.weight_version if body.weight_version is None else str(body.weight_version)
            settled = await self._call(
                lambda: self.engine.update_weights(
                    lambda: load_weights(self.model.module, tensors), version, body.mode
                )
            )
            await asyncio.wrap_future(settled)
        took = time.monotonic() - started
        return _json({"success": True, "message": "updated", "weight_version": version, "seconds": took})

    async def update_weight_version(self, request: Request) -> Response:
        version = str(decode(await self._body(request), WeightVersionRequest).new_version)
        await self._call(lambda: setattr(self.engine, "weight_version", version))
        return _json({"success": True, "new_version": version})

    async def weight_info(self, request: Request) -> Response:
        return _json({"weight_version": self.engine.weight_version})

    # ── pause

    async def pause(self, request: Request) -> Response:
        asked = request.query_params.get("mode", "abort")
        mode = next((mode for mode in _MODES if mode == asked), None)
        if mode is None:
            raise UnknownName("mode", asked, _MODES, field="mode")
        await asyncio.wrap_future(await self._call(lambda: self.engine.pause(mode)))
        return _json({"status": "paused", "mode": mode})

    async def resume(self, request: Request) -> Response:
        await self._call(self.engine.resume)
        return _json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return _json({"is_paused": self.engine.paused})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Nothing is kept between requests, so there is nothing to reset."""
        return _json({"success": True, "message": "this server keeps no prefix cache"})

    # ── about

    async def models(self, request: Request) -> Response:
        model = {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rollserve-local",
            "root": self.name,
            "max_model_len": self.model.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        if not self.thread.alive:
            raise Unavailable("the engine is not running")
        return Response(status_code=200)

    async def metrics(self, request: Request) -> Response:
        return Response(metrics.render(self.engine, self.name), media_type="text/plain; version=0.0.4")

    async def server_info(self, request: Request) -> Response:
        about = {
            "engine": "rollserve-local",
            "model": self.name,
            "logprobs_mode": LOGPROBS_MODE,
            "weight_version": self.engine.weight_version,
            "max_model_len": self.model.max_model_len,
            "max_batch": self.model.max_batch,
            "vocab_size": self.model.vocab_size,
            "device": str(self.model.device),
            "dtype": str(next(self.model.module.parameters()).dtype).removeprefix("torch."),
        }
        return _json(about)

    # ── parts

    @property
    def name(self) -> str:
        return self.settings.served_model_name

    async def _call(self, action: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.thread.call(action))

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.settings.max_body_bytes:
                raise TooLarge(f"a body may have {self.settings.max_body_bytes} bytes", field="body")
            parts.append(part)
        return b"".join(parts)


def make_app(server: LocalServer) -> Starlette:
    posts = {
        "/inference/v1/generate": server.generate,
        "/inference/v1/abort_requests": server.abort_requests,
        "/abort_requests": server.abort_any,
        "/update_weights_from_disk": server.update_weights,
        "/update_weight_version": server.update_weight_version,
        "/pause": server.pause,
        "/resume": server.resume,
        "/reset_prefix_cache": server.reset_prefix_cache,
    }
    gets = {
        "/v1/models": server.models,
        "/health": server.health,
        "/metrics": server.metrics,
        "/server_info": server.server_info,
        "/is_paused": server.is_paused,
        "/weight_info": server.weight_info,
    }
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()]
    return Starlette(routes=routes, lifespan=server.lifespan, exception_handlers={RollserveError: _on_error})


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RollserveError)
    response = _json(problem(error), status=error.status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return response


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
