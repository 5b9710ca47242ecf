"""The scripted policy over HTTP, on vLLM's routes: for tests, and for ``rollserve bench``.

``python -m rollserve.testing.scripted_server --port 8399 --latency-ms 50 --tokens 200 --turns 8``

Plain ASGI. For the bench an answer costs a few string joins: replies are encoded once per turn, the turn
is read off the prompt by counting assistant headers in the raw bytes, and the prompt is echoed verbatim.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from urllib.parse import parse_qs

import msgspec

from rollserve.backend.base import GenerateRequest
from rollserve.errors import RollserveError
from rollserve.records.call import SamplingParams
from rollserve.testing.asgi import (
    JSON,
    Receive,
    Scope,
    Send,
    answer,
    disconnected,
    read_body,
    send_body,
    send_event,
    served,
)
from rollserve.testing.scripted import Chunk, Fault, FaultHit, ScriptedEngine
from rollserve.testing.scripted_bodies import (
    Complete,
    Encode,
    Generate,
    Ids,
    Label,
    Sampling,
    encode_completion,
    encode_completion_event,
    encode_echoed,
    encode_scored,
    encode_stream,
    encode_whole,
)
from rollserve.testing.scripted_turns import Turns, episode


class ScriptedApp:
    """``engine`` is open to the test: set its faults, gate and label. With ``turns`` its script is
    theirs, and plain requests are answered without running the engine."""

    def __init__(self, engine: ScriptedEngine, turns: Turns | None = None) -> None:
        self.engine = engine
        self.turns = turns
        self.generate_open = True
        self._waits: dict[str, asyncio.Timeout] = {}
        self._numbers = itertools.count()
        self._routes: dict[str, Callable[[Scope, bytes, Receive, Send], Awaitable[None]]] = {
            "/inference/v1/generate": self._generate,
            "/inference/v1/abort_requests": self._abort,
            "/v1/completions": self._complete,
            "/v1/models": self._models,
            "/health": self._health,
            "/server_info": self._info,
            "/metrics": self._metrics,
            "/stats": self._stats,
            "/update_weight_version": self._set_label,
            "/is_paused": self._is_paused,
            "/pause": self._pause_all,
            "/resume": self._resume,
            "/reset_prefix_cache": self._reset,
        }
        if turns is not None:
            engine.script = turns.script

    def add_route(self, path: str, route: Callable[[Scope, bytes, Receive, Send], Awaitable[None]]) -> None:
        """Or another in its place: servers differ in what they have besides."""
        self._routes[path] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        route = self._routes.get(scope["path"])
        body = await read_body(receive)
        try:
            if route is None:
                await answer(send, 404, {"error": {"message": f"no route {scope['path']}", "code": 404}})
            else:
                await route(scope, body, receive, send)
        except FaultHit as hit:
            await _act_out(hit.fault, send)
        except msgspec.DecodeError as error:
            await answer(send, 400, {"error": {"message": str(error), "type": "BadRequest", "code": 400}})
        except RollserveError as error:
            problem = {"message": str(error), "type": type(error).__name__, "code": error.status}
            await answer(send, error.status, {"error": problem})

    # ── vLLM's generate

    async def _generate(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        if not self.generate_open:
            await answer(send, 403, {"error": {"message": "scale-out endpoints are disabled", "code": 403}})
            return
        asked = msgspec.json.decode(body, type=Generate)
        if self._is_plain(asked):
            await self._plain(asked, receive, send)
            return
        prompt = msgspec.json.decode(asked.token_ids, type=list[int])
        if asked.sampling_params.prompt_logprobs is not None:
            self.engine.check(asked.model, prompt)
            await send_body(send, 200, encode_scored(prompt, self.engine.score(prompt), self.engine.model))
            return
        salt = asked.cache_salt or ""
        request = self._request(asked.request_id, asked.model, prompt, asked.sampling_params, salt)
        encode = encode_stream if asked.stream else encode_whole
        await self._run(request, asked.stream, encode, receive, send)

    def _is_plain(self, asked: Generate) -> bool:
        """Whether the prepared answer is the right one."""
        sampling, engine = asked.sampling_params, self.engine
        return (
            self.turns is not None
            and not asked.stream
            and sampling.prompt_logprobs is None
            and not engine.faults
            and engine.gate.is_set()
            and engine.paused is None
            and asked.model == engine.model
            and sampling.top_k != 1
            and sampling.temperature > 0
            and self.turns.whole(sampling.stop_token_ids)
            and (sampling.max_tokens is None or sampling.max_tokens >= self._longest)
            and bytes(asked.token_ids).count(b",") + 1 + self._longest < engine.context_tokens
        )

    @property
    def _longest(self) -> int:
        return max(len(reply.token_ids) for reply in self.turns.each) if self.turns is not None else 0

    async def _plain(self, asked: Generate, receive: Receive, send: Send) -> None:
        engine, turns, raw = self.engine, self.turns, bytes(asked.token_ids)
        assert turns is not None
        if b" " in raw:
            raw = msgspec.json.encode(msgspec.json.decode(raw))
        engine.started += 1
        if engine.latency_s > 0 and not await self._pause(asked.request_id, receive):
            engine.aborted += 1
            stopped = Chunk([], [], engine.label, "abort")
            await send_body(send, 200, encode_whole([stopped], asked.request_id, engine.model, None))
            return
        index = turns.index(raw)
        engine.finished += 1
        engine.generated_tokens += len(turns.each[index].token_ids)
        head = b'{"request_id":"' + asked.request_id.encode() + b'","model":"' + engine.model.encode()
        await send_body(
            send,
            200,
            head
            + b'","choices":'
            + turns.choices(index, engine.label)
            + b',"prompt_token_ids":'
            + raw
            + b"}",
        )

    async def _pause(self, request_id: str, receive: Receive) -> bool:
        """Wait the latency; False when the client went away or aborted meanwhile."""
        deadline = asyncio.get_running_loop().time() + self.engine.latency_s
        try:
            async with asyncio.timeout_at(deadline) as wait:
                self._waits[request_id] = wait
                await receive()
        except TimeoutError:
            return wait.when() == deadline
        finally:
            self._waits.pop(request_id, None)
        return False

    # ── OpenAI's completions

    async def _complete(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        asked = msgspec.json.decode(body, type=Complete)
        if asked.echo:
            self.engine.check(asked.model, asked.prompt)
            await send_body(send, 200, encode_echoed(asked.prompt, self.engine.score(asked.prompt)))
            return
        request = self._request(f"cmpl-{next(self._numbers)}", asked.model, asked.prompt, asked)
        encode = encode_completion_event if asked.stream else encode_completion
        await self._run(request, asked.stream, encode, receive, send)

    # ── both

    def _request(
        self, request_id: str, model: str | None, prompt: list[int], sampling: Sampling, salt: str = ""
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            model=self.engine.model if model is None else model,
            token_ids=prompt,
            sampling=SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens or self.engine.context_tokens,
                seed=sampling.seed,
                stop_token_ids=sampling.stop_token_ids,
            ),
            cache_salt=salt,
        )

    async def _run(
        self, request: GenerateRequest, stream: bool, encode: Encode, receive: Receive, send: Send
    ) -> None:
        """Run the engine beside a look-out for the client's going away."""
        gone = asyncio.create_task(disconnected(receive))
        work = asyncio.create_task(self._produce(request, stream, encode, send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _produce(self, request: GenerateRequest, stream: bool, encode: Encode, send: Send) -> None:
        model, chunks, sent = self.engine.model, [], 0
        async with aclosing(self.engine.run(request)) as produced:
            try:
                async for chunk in produced:
                    chunks.append(chunk)
                    if stream:
                        prompt = None if sent else list(request.token_ids)
                        event = encode(chunks, request.request_id, model, prompt)
                        await send_event(send, event, first=not sent)
                        sent += 1
            except FaultHit as hit:
                if sent and hit.fault.kind == "drop":
                    return
                raise
        if stream:
            await send_event(send, b"[DONE]", first=False)
            await send({"type": "http.response.body", "body": b""})
        else:
            await send_body(send, 200, encode(chunks, request.request_id, model, list(request.token_ids)))

    # ── control

    async def _abort(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        wanted = msgspec.json.decode(body, type=Ids).request_ids
        found = self.engine.abort(wanted)
        for request_id in wanted:
            wait = self._waits.get(request_id)
            if wait is not None:
                wait.reschedule(-math.inf)
                found.append(request_id)
        await answer(send, 200, {"aborted": found})

    async def _set_label(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        self.engine.label = msgspec.json.decode(body, type=Label).new_version
        await answer(send, 200, {"success": True, "weight_version": self.engine.label})

    async def _is_paused(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        await answer(send, 200, {"is_paused": self.engine.paused is not None})

    async def _pause_all(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        mode = parse_qs(scope["query_string"].decode()).get("mode", ["abort"])[0]
        await self.engine.pause(mode)
        await answer(send, 200, {"status": "paused", "mode": mode})

    async def _resume(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        self.engine.resume()
        await answer(send, 200, {"status": "resumed"})

    async def _reset(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        self.engine.resets += 1
        await answer(send, 200, {"success": True})

    async def _models(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        model = {"id": self.engine.model, "object": "model", "max_model_len": self.engine.context_tokens}
        adapters = [
            {"id": name, "object": "model", "root": path, "parent": self.engine.model}
            for name, path in self.engine.adapters.items()
        ]
        await answer(send, 200, {"object": "list", "data": [model, *adapters]})

    async def _health(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        unhealthy = self.engine.unhealthy
        await answer(send, 503 if unhealthy else 200, {"message": unhealthy or "ok"})

    async def _info(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        mode = f"{self.engine.logprobs_mode}_logprobs"
        about = {"engine": "rollserve-scripted", "logprobs_mode": mode, "weight_version": self.engine.label}
        await answer(send, 200, about)

    async def _metrics(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        running = len(self.engine.running) + len(self._waits)
        text = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n"
        if self.engine.counts_tokens:
            text += f"vllm:generation_tokens_total {self.engine.generated_tokens + self._under_way()}\n"
        await send_body(send, 200, text.encode(), [(b"content-type", b"text/plain; version=0.0.4")])

    def _under_way(self) -> int:
        """Tokens of prepared answers that are still being waited for, as if each were sampled evenly."""
        if self.turns is None:
            return 0
        now, latency_s = asyncio.get_running_loop().time(), self.engine.latency_s
        shortest = min(len(reply.token_ids) for reply in self.turns.each)
        left_s = (max(0.0, (wait.when() or now) - now) for wait in self._waits.values())
        return sum(int(shortest * max(0.0, 1 - left / latency_s)) for left in left_s)

    async def _stats(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        engine = self.engine
        numbers = {
            "started": engine.started,
            "finished": engine.finished,
            "aborted": engine.aborted,
            "generated_tokens": engine.generated_tokens,
            "running": len(engine.running) + len(self._waits),
        }
        await answer(send, 200, numbers)


# ── ASGI


async def _act_out(fault: Fault, send: Send) -> None:
    """A drop is an answer that is announced and never comes: the server then closes the connection."""
    if fault.kind == "drop":
        headers = [*JSON, (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        return
    headers = [(b"content-type", fault.content_type.encode())]
    if fault.retry_after_s is not None:
        headers.append((b"retry-after", f"{fault.retry_after_s:g}".encode()))
    problem = {"error": {"message": fault.message, "type": "Scripted", "code": fault.status}}
    await send_body(send, fault.status, fault.body or msgspec.json.encode(problem), headers)


# ── serving


@asynccontextmanager
async def serving(app: ScriptedApp, port: int = 0) -> AsyncIterator[str]:
    """The app on a real socket in this event loop; yields its URL."""
    async with served(app, port=port) as url:
        try:
            yield url
        finally:
            app.engine.gate.set()
            app.engine.abort(list(app.engine.running))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rollserve.testing.scripted_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8399, help="0 takes a free one, printed at the start")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="of each reply")
    parser.add_argument("--tokens", type=int, default=200, help="sampled in each reply")
    parser.add_argument("--turns", type=int, default=8, help="replies of an episode; the last ends it")
    parser.add_argument("--tool", default="shell")
    parser.add_argument("--arguments", default='{"command": "true"}', help="of the call, as JSON")
    parser.add_argument("--final-text", default="done")
    parser.add_argument("--final-tool", help="call this tool in the last turn instead of a text")
    parser.add_argument("--final-arguments", default="{}")
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--context-tokens", type=int, default=32768)
    parser.add_argument("--label", default="0", help="the weight version it reports")
    return parser.parse_args(argv)


async def _serve(options: argparse.Namespace) -> None:
    import uvicorn

    engine = ScriptedEngine(
        model=options.model,
        context_tokens=options.context_tokens,
        latency_s=options.latency_ms / 1000,
        label=options.label,
    )
    turns = episode(
        turns=options.turns,
        tokens=options.tokens,
        tool=options.tool,
        arguments=options.arguments,
        final_text=options.final_text,
        final_tool=options.final_tool,
        final_arguments=options.final_arguments,
    )
    listener = socket.create_server((options.host, options.port), backlog=4096)
    sys.stdout.write(f"scripted backend on http://{options.host}:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(
        ScriptedApp(engine, turns),
        lifespan="off",
        ws="none",
        http="httptools",
        access_log=False,
        log_level="warning",
        backlog=4096,
        timeout_graceful_shutdown=1,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def main(argv: Sequence[str] | None = None) -> None:
    import uvloop

    uvloop.run(_serve(_arguments(argv)))


if __name__ == "__main__":
    main()
