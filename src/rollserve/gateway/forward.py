"""The forward step: one request, one call.

Checks → wait while the policy is paused → where in the tree → prompt ids → generation → parse → record
→ answer. The call is in the attempt's segment before anyone sees the end of its answer.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from rollserve.agent.base import Reply
from rollserve.backend.base import GenerateRequest, Routed
from rollserve.errors import (
    ContextTooLong,
    InfrastructureFailure,
    InvalidInput,
    LimitReached,
    RollserveError,
    SessionClosed,
)
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.parsing import Parsed
from rollserve.gateway.policies import PolicyState
from rollserve.gateway.rendering import Prior, Rendering
from rollserve.gateway.tree import Match, Node, Tree, reroot
from rollserve.gateway.truth import inexact, version_spans
from rollserve.records.base import new_id
from rollserve.records.call import Call, ChatRequest, SamplingParams, pack_ids, unpack_ids

_KEPT_CONTEXTS = 4

_log = structlog.get_logger(__name__)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a call led to; ids and logprobs for dialects that pass them on."""

    reply: Reply
    sampled_ids: list[int]
    logprobs: list[float]


class Listener(Protocol):
    """Follows a generation: ``begin`` once, with the call's own prompt ids, then sampled ids."""

    def begin(self, rendering: Rendering, prompt_tail: list[int], offered_tools: bool) -> None: ...

    def sampled(self, ids: list[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is sent, and where its call will stand. ``prompt`` are the call's own ids."""

    match: Match
    prompt: list[int]
    token_ids: list[int]
    sampling: SamplingParams


class Conversation:
    """The calls of one session, and what it takes to make the next."""

    def __init__(self, session_id: str, spec: SessionSpec, policy: PolicyState, rendering: Rendering) -> None:
        self.session_id = session_id
        self.spec = spec
        self.policy = policy
        self.rendering = rendering
        self.tree = Tree()
        self.closed = False
        self.in_flight = 0
        self.waiting = 0
        self.call_ids: list[str] = []
        self.trouble: LimitReached | InfrastructureFailure | None = None
        self.counts = {"turns": 0, "sampled_tokens": 0, "prompt_tokens": 0, "breaks": 0, "inexact": 0}
        self._opened = time.monotonic()
        self._contexts: dict[str, tuple[list[int], list[int], list[int]]] = {}

    async def forward(self, request: ChatRequest, listener: Listener | None = None) -> Answer:
        """Raises ``SessionClosed``, ``LimitReached``, ``ContextTooLong``, ``InvalidInput``,
        ``BackendError``. Cancelling it aborts the generation at the backend; nothing is recorded then."""
        self.trouble = None
        try:
            return await self._within_limits(request, listener)
        except (LimitReached, InfrastructureFailure) as error:
            self.trouble = error
            raise
        except ContextTooLong as error:
            self.trouble = LimitReached("context_tokens", str(error))
            raise
        except RollserveError:
            raise
        except Exception as error:  # a bug of ours, or what no backend should send: not the agent's doing
            _log.exception("gateway.call_failed", session=self.session_id)
            message = f"the call failed: {type(error).__name__}: {error}"
            self.trouble = InfrastructureFailure(message, operation="gateway.forward")
            raise self.trouble from error

    async def _within_limits(self, request: ChatRequest, listener: Listener | None) -> Answer:
        self._admit()
        wall_s = self.spec.limits.wall_s
        self.in_flight += 1
        try:
            async with asyncio.timeout(self._opened + wall_s - time.monotonic()) as deadline:
                return await self._call(request, listener)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise LimitReached("wall_s", f"no answer within {wall_s:g} s of wall time") from error
        finally:
            self.in_flight -= 1

    def _admit(self) -> None:
        limits = self.spec.limits
        if self.closed:
            raise SessionClosed("the session has ended")
        if self.counts["turns"] + self.in_flight >= limits.max_turns:
            raise LimitReached("max_turns", f"all {limits.max_turns} turns are used")
        if self.counts["sampled_tokens"] >= limits.max_sampled_tokens:
            raise LimitReached("max_sampled_tokens", f"all {limits.max_sampled_tokens} tokens are used")

    async def _call(self, request: ChatRequest, listener: Listener | None) -> Answer:
        started_at = time.time()
        if not self.policy.ready:
            await self._wait()
        plan = self._plan(request)
        policy = self.policy.policy
        first_token_at: list[float] = []

        def on_tokens(ids: list[int], logprobs: list[float]) -> None:
            if not first_token_at:
                first_token_at.append(time.time())
            if listener is not None:
                listener.sampled(ids)

        if listener is not None:
            listener.begin(self.rendering, plan.prompt, bool(request.tools))
        routed = await self.policy.pool.generate(
            self.session_id,
            GenerateRequest(
                request_id=new_id("gen"),
                model=policy.spec.model,
                token_ids=plan.token_ids,
                sampling=plan.sampling,
                cache_salt=f"{policy.spec.name}:{policy.version}",
            ),
            None if listener is None else on_tokens,
            pause=self.spec.clock.pause,
        )
        times = (started_at, first_token_at[0] if first_token_at else None, time.time())
        return self._record(request, plan, routed, policy.version, times)

    async def _wait(self) -> None:
        self.waiting += 1
        try:
            with self.spec.clock.pause():
                await self.policy.wait_ready()
        finally:
            self.waiting -= 1

    def _plan(self, request: ChatRequest) -> _Plan:
        match = self.tree.match(request.messages, request.tools)
        prompt: list[int] | None = None
        if match.parent is not None:
            prompt = self.rendering.extend(self._prior(match.parent), match.new, request.tools)
            if prompt is None:
                cause = "thinking_stripped" if self.rendering.thinking == "strip" else "template"
                match = reroot(match.given, match.parent, cause)
        if match.parent is None or prompt is None:
            prompt = self.rendering.render(match.new, request.tools)
            token_ids = prompt
        else:
            before, sampled, _ = self._context(match.parent)
            token_ids = [*before, *sampled, *prompt]
        return _Plan(match, prompt, token_ids, self._sampling(request, len(token_ids)))

    def _prior(self, node: Node) -> Prior:
        before, sampled, prompt = self._context(node)
        return Prior(
            prompt_ids=prompt,
            sampled_ids=sampled,
            context=lambda: [*before, *sampled],
            conversation=node.conversation() if self.rendering.reads_history else (node.reply,),
        )

    def _context(self, node: Node) -> tuple[list[int], list[int], list[int]]:
        """All ids up to the node's sampled ones, those, and its own prompt ids."""
        known = self._contexts.get(node.call_id)
        if known is None:
            path = node.path()
            before = [i for each in path[:-1] for i in (*_ids(each.prompt_ids), *_ids(each.sampled_ids))]
            prompt = _ids(node.prompt_ids)
            known = ([*before, *prompt], _ids(node.sampled_ids), prompt)
            self._keep(node.call_id, known)
        return known

    def _keep(self, call_id: str, context: tuple[list[int], list[int], list[int]]) -> None:
        self._contexts[call_id] = context
        if len(self._contexts) > _KEPT_CONTEXTS:
            del self._contexts[next(iter(self._contexts))]

    def _sampling(self, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
        """The run's settings; a request can only tighten ``max_tokens``. Calls made at once share what
        is left of the token budget, and may pass it together."""
        run, limits = self.spec.run.sampling, self.spec.limits
        room = [run.max_tokens, limits.max_sampled_tokens - self.counts["sampled_tokens"]]
        if (context := self.policy.context_tokens) is not None:
            if prompt_tokens >= context:
                raise ContextTooLong(
                    f"maximum context length is {context} tokens, the prompt has {prompt_tokens}",
                    field="messages",
                )
            room.append(context - prompt_tokens)
        for name in ("max_tokens", "max_completion_tokens"):
            asked = request.asked.get(name)
            if asked is None:
                continue
            if not isinstance(asked, int) or asked < 1:
                raise InvalidInput("must be a whole number of at least 1", field=name)
            room.append(asked)
        return SamplingParams(
            temperature=run.temperature,
            top_p=run.top_p,
            top_k=run.top_k,
            max_tokens=max(1, min(room)),
            seed=run.seed,
            stop_token_ids=self.rendering.stop_token_ids,
        )

    def _record(
        self,
        request: ChatRequest,
        plan: _Plan,
        routed: Routed,
        version_at_start: int,
        times: tuple[float, float | None, float],
    ) -> Answer:
        """Make the call, append it to the segment, then to the tree; in this order."""
        generation, match = routed.generation, plan.match
        cut = generation.finish_reason != "stop"
        parsed = self.rendering.parse(generation.token_ids, request.tools, plan.prompt, cut=cut)
        policy = self.policy.policy
        low, high = sorted((version_at_start, policy.version))
        cause, logprobs = inexact(generation, plan.token_ids, plan.sampling, routed.info.logprobs_mode)
        parent_tools = match.parent.tools if match.parent else ()
        call = Call(
            id=new_id("mc"),
            parent=match.parent.call_id if match.parent else None,
            messages=match.new,
            tools=request.tools if request.tools != parent_tools else None,
            prompt_ids=pack_ids(plan.prompt),
            sampled_ids=pack_ids(generation.token_ids),
            logprobs=logprobs,
            versions=version_spans(generation.labels, len(generation.token_ids), policy.labels, low, high),
            reply=parsed.message,
            finish_reason=generation.finish_reason if cut else parsed.finish,
            sampling=plan.sampling,
            asked=request.asked,
            backend=routed.backend_id,
            logprobs_mode=routed.info.logprobs_mode,
            broke=match.broke,
            inexact=cause,
            extras=generation.extras,
            started_at=times[0],
            first_token_at=times[1],
            finished_at=times[2],
        )
        try:
            self.spec.segment.append_call(call)
        except OSError as error:
            raise InfrastructureFailure(
                f"can't record the call: {error}", operation="gateway.record"
            ) from error
        self._remember(request, plan, call, generation.token_ids)
        return _answer(call, parsed, plan, routed)

    def _remember(self, request: ChatRequest, plan: _Plan, call: Call, sampled: list[int]) -> None:
        node = self.tree.add(
            plan.match,
            call_id=call.id,
            reply=call.reply,
            tools=request.tools,
            prompt_ids=call.prompt_ids,
            sampled_ids=call.sampled_ids,
        )
        self._keep(node.call_id, (plan.token_ids, sampled, plan.prompt))
        self.call_ids.append(call.id)
        self.counts["turns"] += 1
        self.counts["sampled_tokens"] += len(sampled)
        self.counts["prompt_tokens"] += len(plan.prompt)
        self.counts["breaks"] += call.broke is not None
        self.counts["inexact"] += call.inexact is not None
        if self.spec.on_call is not None:
            self.spec.on_call()


def _answer(call: Call, parsed: Parsed, plan: _Plan, routed: Routed) -> Answer:
    generation = routed.generation
    reply = Reply(
        call_id=call.id,
        message=parsed.message,
        finish_reason=call.finish_reason,
        prompt_tokens=len(plan.token_ids),
        sampled_tokens=len(generation.token_ids),
    )
    return Answer(reply=reply, sampled_ids=generation.token_ids, logprobs=generation.logprobs)


def _ids(packed: bytes) -> list[int]:
    ids: list[int] = unpack_ids(packed).tolist()
    return ids
