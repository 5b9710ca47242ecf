"""A scripted policy on a machine with bounds: tokens a second that saturate, and a key-value cache.

What a reply is, the script says; how long it takes, the machine: all who run share what it can do, a prompt
is read before the reply is sampled, blocks that an earlier prompt or reply has left in the cache are not read
again, and when the cache is full the newest request loses its place and has to read everything anew. It is
enough of vLLM to see what routing, stickiness and a bound on concurrency are worth, without one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import count

from rollserve.backend.base import BackendHealth, GenerateRequest, Generation, TokenSink
from rollserve.testing.asgi import Receive, Scope, Send, send_body
from rollserve.testing.scripted import Chunk, Script, ScriptedBackend, ScriptedEngine, logprob_of
from rollserve.testing.scripted_server import ScriptedApp

BLOCK = 16
STEP_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``peak`` tokens a second with any number of requests, half of it with ``half``; ``cache_tokens`` in the
    key-value cache; reading a token of a prompt is ``read_cost`` of the work of sampling one."""

    peak: float
    half: float
    cache_tokens: int
    read_cost: float = 0.1

    def rate(self, running: int) -> float:
        return self.peak * running / (running + self.half) if running else 0.0


def chain(token_ids: Sequence[int], salt: str = "") -> list[int]:
    """A name for each whole block: what stands in it, and in all before it."""
    names, name = [], hash(salt)
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        name = hash((name, tuple(token_ids[start : start + BLOCK])))
        names.append(name)
    return names


class KvCache:
    """Blocks in use by name (by how many), blocks in use without one, and blocks that are only kept, the
    longest unused first to go."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._used: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._unnamed = 0

    @property
    def use(self) -> float:
        return (len(self._used) + self._unnamed) / self.blocks

    def take(self, names: Sequence[int]) -> int | None:
        """Use these; how many of the first were there. None when there is no room, and nothing is used."""
        found = 0
        while found < len(names) and (names[found] in self._used or names[found] in self._kept):
            found += 1
        for name in names[:found]:
            self._hold(name)
        if not self._room(len(names) - found):
            self.leave(names[:found])
            return None
        for name in names[found:]:
            self._hold(name)
        return found

    def grow(self) -> bool:
        """One block more without a name; whether there is room."""
        if not self._room(1):
            return False
        self._unnamed += 1
        return True

    def leave(self, names: Sequence[int], unnamed: int = 0) -> None:
        """No longer used; kept while there is room. The last of them go first."""
        self._unnamed -= unnamed
        for name in reversed(names):
            self._used[name] -= 1
            if not self._used[name]:
                del self._used[name]
                self._kept[name] = None

    def keep(self, names: Sequence[int]) -> None:
        """What was made in blocks without a name, as far as there is room."""
        for name in reversed(names):
            if name not in self._used and self._room(1):
                self._kept[name] = None
                self._kept.move_to_end(name)

    def _hold(self, name: int) -> None:
        self._kept.pop(name, None)
        self._used[name] = self._used.get(name, 0) + 1

    def _room(self, blocks: int) -> bool:
        used = len(self._used) + self._unnamed
        if used + blocks > self.blocks:
            return False
        while used + len(self._kept) + blocks > self.blocks:
            self._kept.popitem(last=False)
        return True


@dataclass(eq=False, kw_only=True)
class Request:
    """``made`` tokens of ``answer_ids`` are sampled, work of ``to_read`` is left before the next."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    names: list[int]
    salt: str = ""
    made: float = 0.0
    to_read: float = 0.0
    unnamed: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)


class EngineModel:
    """Pure but for the events of its requests: time passes in ``step``. Counted since the start: ``worked``
    (in sampled tokens), ``sampled``, ``prompt_tokens``, of these ``hit_tokens``, and ``preemptions``."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cache = KvCache(machine.cache_tokens // BLOCK)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.worked = self.sampled = 0.0
        self.prompt_tokens = self.hit_tokens = self.preemptions = 0

    def submit(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], salt: str = "") -> Request:
        """Together they must fit into the cache, with two blocks to spare."""
        names = chain(prompt_ids, salt)
        request = Request(prompt_ids=prompt_ids, answer_ids=answer_ids, names=names, salt=salt)
        self.waiting.append(request)
        return request

    def drop(self, request: Request) -> None:
        """It is not wanted any more. One that is over already stays as it is."""
        if request in self.running:
            self.running.remove(request)
            self.cache.leave(request.names, request.unnamed)
        elif request in self.waiting:
            self.waiting.remove(request)

    def step(self, seconds: float) -> None:
        self._admit()
        share = self.machine.rate(len(self.running)) * seconds / max(1, len(self.running))
        for request in list(self.running):
            if request in self.running:
                self._advance(request, share)
        for request in [each for each in self.running if each.made >= len(each.answer_ids)]:
            self._finish(request)

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            hits = self.cache.take(request.names)
            if hits is None:
                return
            self.waiting.popleft()
            self.running.append(request)
            self.prompt_tokens += len(request.prompt_ids)
            self.hit_tokens += hits * BLOCK
            request.to_read = len(request.prompt_ids) + request.made - hits * BLOCK
            request.to_read *= self.machine.read_cost

    def _advance(self, request: Request, share: float) -> None:
        read = min(share, request.to_read)
        request.to_read -= read
        made = min(share - read, len(request.answer_ids) - request.made)
        request.made += made
        self.worked += read + made
        self.sampled += made
        while request.unnamed * BLOCK < request.made:
            if self.cache.grow():
                request.unnamed += 1
            elif not self._preempt(request):
                return

    def _preempt(self, wanting: Request) -> bool:
        """The newest gives way, if need be the one that wants: False then."""
        newest = self.running.pop()
        self.cache.leave(newest.names, newest.unnamed)
        newest.unnamed = 0
        self.waiting.appendleft(newest)
        self.preemptions += 1
        return newest is not wanting

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.leave(request.names, request.unnamed)
        self.cache.keep(chain([*request.prompt_ids, *request.answer_ids], request.salt)[len(request.names) :])
        request.over.set()


class ModelledEngine(ScriptedEngine):
    """What its script says, in the time of ``machine``. It knows no faults, gate or latency; a pause it takes
    as between requests."""

    def __init__(self, script: Script, machine: Machine) -> None:
        super().__init__(script, context_tokens=machine.cache_tokens - 2 * BLOCK)
        self.simulation = EngineModel(machine)
        self._driver: asyncio.Task[None] | None = None

    async def _chunks(self, request: GenerateRequest, stopped: asyncio.Event) -> AsyncGenerator[Chunk]:
        ids, reason, _ = self._reply(request)
        asked = self.simulation.submit(list(request.token_ids), ids, request.cache_salt)
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        waits = {asyncio.ensure_future(asked.over.wait()), asyncio.ensure_future(stopped.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            self.simulation.drop(asked)
        whole = asked.over.is_set()
        made = ids if whole else ids[: int(asked.made)]
        yield Chunk(made, [logprob_of(each) for each in made], self.label, reason if whole else "abort")

    async def _drive(self) -> None:
        """While there is something to do. Late steps are caught up with."""
        loop = asyncio.get_running_loop()
        done = loop.time()
        try:
            while self.simulation.running or self.simulation.waiting:
                await asyncio.sleep(STEP_S)
                while done + STEP_S <= loop.time():
                    self.simulation.step(STEP_S)
                    done += STEP_S
        finally:
            self._driver = None


class SteppedBackend(ScriptedBackend):
    """The machine as a backend in process, for a clock that its caller turns: time passes in
    ``simulation.step``. An answer has as many tokens as it may."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(ScriptedEngine(), model="scripted")
        self.simulation = EngineModel(machine)
        self._ids = count()

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        ids = [next(self._ids) for _ in range(request.sampling.max_tokens)]
        asked = self.simulation.submit(request.token_ids, ids, request.cache_salt)
        try:
            await asked.over.wait()
        finally:
            self.simulation.drop(asked)
        return Generation(token_ids=ids, logprobs=[logprob_of(each) for each in ids], finish_reason="length")

    async def health(self) -> BackendHealth:
        model = self.simulation
        return BackendHealth(
            ok=True,
            running=len(model.running),
            waiting=len(model.waiting),
            generated_tokens=int(model.sampled),
            kv_use=model.cache.use,
            preemptions=model.preemptions,
        )


def modelled_app(engine: ModelledEngine) -> ScriptedApp:
    """Its metrics are the machine's."""
    app = ScriptedApp(engine)

    async def metrics(scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        model = engine.simulation
        text = (
            f"vllm:num_requests_running {len(model.running)}\n"
            f"vllm:num_requests_waiting {len(model.waiting)}\n"
            f"vllm:kv_cache_usage_perc {model.cache.use:.4f}\n"
            f"vllm:num_preemptions_total {model.preemptions}\n"
            f"vllm:generation_tokens_total {int(model.sampled)}\n"
        )
        await send_body(send, 200, text.encode(), [(b"content-type", b"text/plain; version=0.0.4")])

    app.add_route("/metrics", metrics)
    return app
