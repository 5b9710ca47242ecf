"""The forward step: one request, one call.

Checks → wait while the policy is paused → where in the tree → prompt ids → generation → parse → record
→ answer. The call is in the attempt's segment before anyone sees the end of its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from rollserve.agent.base import Reply
from rollserve.backend.base import Chat, GenerateRequest, Generation
from rollserve.errors import (
    ContextTooLong,
    InexactTokens,
    InfrastructureFailure,
    InvalidInput,
    LimitReached,
    RollserveError,
    SessionClosed,
)
from rollserve.gateway import apart, drift, whole
from rollserve.gateway.base import Ending, SessionSpec
from rollserve.gateway.chatting import chat_of, gained
from rollserve.gateway.lineage import Lineage, at_record, of_request, without_break
from rollserve.gateway.node import Match, Node
from rollserve.gateway.parsing import Parsed, adopted
from rollserve.gateway.policies import PolicyState
from rollserve.gateway.rendering import Prior, Rendering
from rollserve.gateway.stopping import Ended, Hearing, Listener, ended, follow
from rollserve.gateway.tokens import TextTokenizer
from rollserve.gateway.tree import Tree
from rollserve.gateway.truth import begun, inexact
from rollserve.gateway.turns import EDITED
from rollserve.records.base import new_id
from rollserve.records.call import (
    Call,
    ChatRequest,
    Drift,
    Message,
    SamplingParams,
    VersionSpan,
    pack_ids,
    unpack_ids,
)

_KEPT_CONTEXTS = 4
_COUNTS = ("turns", "sampled_tokens", "prompt_tokens", "breaks", "inexact", "rewritten")

_log = structlog.get_logger(__name__)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a call led to; ids and logprobs for dialects that pass them on, ``spell`` gives an id's text.
    ``cached_tokens`` of the prompt were known before; ``stopped_by`` is the request's text that ended it."""

    reply: Reply
    sampled_ids: list[int]
    logprobs: list[float]
    spell: Callable[[int], str]
    cached_tokens: int = 0
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What answers a call: a policy, and its way between messages and ids. Without a ``rendering`` the
    engine renders, and reads what was said; without a ``tokenizer`` there are no ids."""

    policy: PolicyState
    rendering: Rendering | None = None
    tokenizer: TextTokenizer | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is sent, by whom it is answered, and where its call will stand. ``prompt`` are its own ids. Where
    the engine renders ``chat`` is sent, and ``token_ids`` are those that its prompt should begin with, until
    it has told which it consumed."""

    by: Served
    match: Match
    lineage: Lineage
    prompt: list[int]
    token_ids: list[int]
    sampling: SamplingParams
    chat: Chat | None = None


class Conversation:
    """The calls of one session, and what it takes to make the next. ``side`` answers side calls."""

    def __init__(self, session_id: str, spec: SessionSpec, main: Served, side: Served | None = None) -> None:
        self.session_id = session_id
        self.spec = spec
        self.main = main
        self.side = side
        self.tree = Tree()
        self.ended: Ending | None = None
        self.in_flight = 0
        self.waiting = 0
        self.call_ids: list[str] = []
        self.trouble: LimitReached | InfrastructureFailure | None = None
        self.counts = dict.fromkeys(_COUNTS, 0)
        self._told_tokens = 0
        self._opened = time.monotonic()
        self._contexts: dict[str, tuple[list[int], list[int], list[int]]] = {}

    @property
    def policy(self) -> PolicyState:
        return self.main.policy

    async def forward(
        self, request: ChatRequest, listener: Listener | None = None, *, call_id: str | None = None
    ) -> Answer:
        """``call_id`` is what the call will be named. Raises ``SessionClosed``, ``LimitReached``,
        ``ContextTooLong``, ``InvalidInput``, ``BackendError``. Cancelling it aborts the generation at the
        backend; nothing is recorded then."""
        self.trouble = None
        try:
            return await self._within_limits(request, listener, call_id or new_id("mc"))
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

    async def _within_limits(self, request: ChatRequest, listener: Listener | None, call_id: str) -> Answer:
        self._admit()
        wall_s = self.spec.limits.wall_s
        self.in_flight += 1
        try:
            async with asyncio.timeout(self._opened + wall_s - time.monotonic()) as deadline:
                return await self._call(request, listener, call_id)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise LimitReached("wall_s", f"no answer within {wall_s:g} s of wall time") from error
        finally:
            self.in_flight -= 1
            del deadline  # it holds the task, whose error holds this frame: a circle for the collector

    def _admit(self) -> None:
        limits = self.spec.limits
        if self.ended is not None:
            raise session_closed(self.ended)
        if self.counts["turns"] + self.in_flight >= limits.max_turns:
            raise LimitReached("max_turns", f"all {limits.max_turns} turns are used")
        if self._sampled >= limits.max_sampled_tokens:
            raise LimitReached("max_sampled_tokens", f"all {limits.max_sampled_tokens} tokens are used")

    @property
    def _sampled(self) -> int:
        """Tokens of the budget that are used; those without ids are as many as the engine says."""
        return self.counts["sampled_tokens"] + self._told_tokens

    async def _call(self, request: ChatRequest, listener: Listener | None, call_id: str) -> Answer:
        started_at = time.time()
        if not self.policy.ready:
            await self._wait(self.policy)
        plan = await self._plan(request)
        if not plan.by.policy.ready:
            await self._wait(plan.by.policy)
        following = follow(plan.by.rendering, request, plan.prompt, listener)
        clock = self.spec.clock
        made = await whole.generate(
            plan.by.policy,
            self.session_id,
            GenerateRequest(
                request_id=new_id("gen"),
                model=plan.by.policy.policy.spec.model,
                token_ids=plan.token_ids if plan.chat is None else [],
                sampling=plan.sampling,
                session_id=self.session_id,
                chat=_heard_by(plan.chat, following),
            ),
            following,
            whole.Budget(pause=clock.pause, refundable=clock.refundable),
        )
        times = (started_at, following.first_token_at if following else None, time.time())
        last = ended(plan.by.rendering, request, plan.prompt, made.routed, following)
        plan = self._consumed(plan, last.routed.generation)
        return self._record(request, plan, last, made.versions, times, call_id)

    async def count(self, request: ChatRequest) -> int:
        """Tokens of the request's prompt; nothing is sent, and nothing recorded. Raises ``InvalidInput``, and
        ``ContextTooLong`` where there are so many that nobody counts them."""
        try:
            plan = await self._plan(replace(request, schema=None))
            if plan.chat is not None:
                raise InvalidInput("the engine renders: tokens can't be counted before it is asked")
            return len(plan.token_ids)
        except ContextTooLong as error:
            if error.prompt_tokens is None:
                raise
            return error.prompt_tokens

    async def _wait(self, policy: PolicyState) -> None:
        self.waiting += 1
        try:
            with self.spec.clock.pause():
                await policy.wait_ready()
        finally:
            self.waiting -= 1

    async def _plan(self, request: ChatRequest) -> _Plan:
        match = self.tree.match(request.messages, request.tools, self.spec.run.rewrites)
        self._refuse_rewrites(match)
        lineage = of_request(self.tree, match, request)
        match = without_break(self.tree, match, lineage)
        by, match = self._served(match, lineage)
        rendering = by.rendering
        if rendering is None:
            return self._unrendered(by, match, lineage, request)
        context, prompt = by.policy.context_tokens, None
        if match.parent is not None:
            prior = self._prior(match.parent, rendering)
            prompt = await apart.extend(rendering, prior, match.new, request.tools, context)
            if prompt is None:
                cause = "thinking_stripped" if rendering.thinking == "strip" else "template"
                lineage = lineage._replace(origin=match.parent.call_id)
                match = self.tree.reroot(match, cause)
        if match.parent is None or prompt is None:
            prompt = await apart.render(rendering, match.new, request.tools, context)
            token_ids = prompt
        else:
            before, sampled, _ = self._context(match.parent)
            token_ids = [*before, *sampled, *prompt]
        return _Plan(by, match, lineage, prompt, token_ids, self._sampling(by, request, len(token_ids)))

    def _unrendered(self, by: Served, match: Match, lineage: Lineage, request: ChatRequest) -> _Plan:
        """Where the engine renders: it gets the model's own turns as the model gave them."""
        known, conversation = list[int](), match.new
        if match.parent is not None:
            before, sampled, _ = self._context(match.parent)
            known, conversation = [*before, *sampled], (*match.parent.conversation(), *match.new)
        sampling = self._sampling(by, request, len(known))
        return _Plan(by, match, lineage, [], known, sampling, chat_of(conversation, request.tools))

    def _consumed(self, plan: _Plan, generation: Generation) -> _Plan:
        """With the ids that the engine consumed, which prove that the call extends its parent: where they
        don't begin with its context it is a new root."""
        consumed = generation.prompt_ids
        if plan.chat is None or consumed is None:
            return plan
        prompt, match, lineage = gained(plan.token_ids, consumed), plan.match, plan.lineage
        if prompt is None:
            prompt = consumed
            if match.parent is not None:
                lineage = lineage._replace(origin=match.parent.call_id)
                match = self.tree.reroot(match, "template")
        return dataclass_replace(plan, prompt=prompt, token_ids=consumed, match=match, lineage=lineage)

    def _served(self, match: Match, lineage: Lineage) -> tuple[Served, Match]:
        """Who answers; a call that goes on from one that another policy answered is rendered whole."""
        if self.side is None:
            return self.main, match
        aside = lineage.label == "side"
        if match.parent is not None and (match.parent.label == "side") != aside:
            match = dataclass_replace(self.tree.reroot(match, "side_policy"), broke=None)
        return self.side if aside else self.main, match

    def _refuse_rewrites(self, match: Match) -> None:
        """Raises ``InexactTokens`` where the run's rule is to fail on what this request rewrites."""
        if self.spec.run.rewrites != "fail" or not (match.differences or match.edited):
            return
        self.counts["rewritten"] += 1
        at = match.differences[0].at if match.differences else match.broke.at_message if match.broke else 0
        causes = match.differences[0].form.causes if match.differences else (EDITED,)
        raise InexactTokens(
            f"message {at} is not what it was ({', '.join(causes)}), and the run says fail",
            operation="gateway.match",
        )

    def _drift(self, plan: _Plan, generation: Generation, cause: str | None) -> tuple[Drift, ...]:
        """Of a call that is about to be recorded; ``cause`` is why it can't be trained on."""
        rendering, found = plan.by.rendering, list[Drift]()
        match, tokenizer = plan.match, plan.by.tokenizer
        if tokenizer is None:
            return () if cause is None else (Drift(cause=cause),)
        if self.spec.run.rewrites == "exact":
            for difference in self.tree.unseen(match):
                found += drift.absorbed(difference, tokenizer)
        node = self.tree.get(match.broke.from_call or "") if match.broke else None
        if match.broke is not None and node is not None and plan.by is self.main:
            before, sampled, _ = self._context(node)
            context = [*before, *sampled]
            stops = () if rendering is None else rendering.stop_token_ids
            found.append(drift.broken(match.broke, context, plan.prompt, tokenizer, stops))
        if cause is not None:
            sampled_count, consumed = len(generation.token_ids), generation.prompt_ids
            found.append(drift.inexact(cause, plan.token_ids, consumed, sampled_count, tokenizer))
        return tuple(found)

    def _prior(self, node: Node, rendering: Rendering) -> Prior:
        before, sampled, prompt = self._context(node)
        return Prior(
            prompt_ids=prompt,
            sampled_ids=sampled,
            context=lambda: [*before, *sampled],
            conversation=node.conversation() if rendering.reads_history else (node.reply,),
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

    def _sampling(self, by: Served, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
        """The run's settings; a request can only tighten ``max_tokens``. Calls made at once share what
        is left of the token budget, and may pass it together."""
        run, limits = self.spec.run.sampling, self.spec.limits
        room = [run.max_tokens, limits.max_sampled_tokens - self._sampled]
        if (context := by.policy.context_tokens) is not None:
            if prompt_tokens >= context:
                raise ContextTooLong(
                    f"maximum context length is {context} tokens, the prompt has {prompt_tokens}",
                    field="messages",
                    prompt_tokens=prompt_tokens,
                    context_tokens=context,
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
            stop_token_ids=() if by.rendering is None else by.rendering.stop_token_ids,
            json_schema=self._schema(by, request),
        )

    def _schema(self, by: Served, request: ChatRequest) -> dict[str, Any] | None:
        if request.schema is not None and not by.policy.structured:
            raise InvalidInput(
                "the backends of this policy can't be held to a schema", field="schema", hint="leave it out"
            )
        return request.schema

    def _record(
        self,
        request: ChatRequest,
        plan: _Plan,
        last: Ended,
        versions: tuple[VersionSpan, ...],
        times: tuple[float, float | None, float],
        call_id: str,
    ) -> Answer:
        """Make the call, append it to the segment, then to the tree; in this order."""
        routed, match = last.routed, plan.match
        generation = routed.generation
        cut = generation.finish_reason != "stop"
        parsed = last.text(_parsed(plan, generation, request, cut))
        cause, logprobs = inexact(generation, plan.token_ids, plan.sampling, routed.info.logprobs_mode)
        parent_tools = match.parent.tools if match.parent else ()
        lineage = at_record(self.tree, match, plan.lineage)
        call = Call(
            id=call_id,
            parent=match.parent.call_id if match.parent else None,
            messages=match.new,
            tools=request.tools if request.tools != parent_tools else None,
            prompt_ids=pack_ids(plan.prompt),
            sampled_ids=pack_ids(generation.token_ids),
            logprobs=logprobs,
            versions=begun(versions, len(generation.token_ids)),
            reply=parsed.message,
            finish_reason=generation.finish_reason if cut else parsed.finish,
            sampling=plan.sampling,
            asked=request.asked,
            backend=routed.backend_id,
            logprobs_mode=routed.info.logprobs_mode,
            constrained=plan.sampling.json_schema is not None,
            broke=match.broke,
            inexact=cause,
            label=lineage.label,
            origin=lineage.origin,
            drift=self._drift(plan, generation, cause),
            policy="" if plan.by is self.main else plan.by.policy.policy.spec.name,
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
        if generation.usage is not None and not call.sampled_ids:
            self._told_tokens += generation.usage.sampled_tokens
        self._remember(request, plan, call, generation.token_ids, last.stopped_by)
        return _answer(call, parsed, plan, last)

    def _remember(
        self, request: ChatRequest, plan: _Plan, call: Call, sampled: list[int], ending: str | None
    ) -> None:
        node = self.tree.add(
            plan.match,
            call_id=call.id,
            reply=call.reply,
            tools=request.tools,
            prompt_ids=call.prompt_ids,
            sampled_ids=call.sampled_ids,
            label=call.label,
            ending=ending,
        )
        self._keep(node.call_id, (plan.token_ids, sampled, plan.prompt))
        self.call_ids.append(call.id)
        self.counts["turns"] += 1
        self.counts["sampled_tokens"] += len(sampled)
        self.counts["prompt_tokens"] += len(plan.prompt)
        self.counts["breaks"] += call.broke is not None
        self.counts["inexact"] += call.inexact is not None
        self.counts["rewritten"] += bool(plan.match.differences or plan.match.edited)
        if self.spec.on_call is not None:
            self.spec.on_call()


def session_closed(ending: Ending) -> SessionClosed:
    return SessionClosed(f"this session is over: {ending.value}", hint="no later call can succeed")


def _heard_by(chat: Chat | None, following: object) -> Chat | None:
    if chat is None or not isinstance(following, Hearing):
        return chat
    return replace(chat, hear=following.hear)


def _parsed(plan: _Plan, generation: Generation, request: ChatRequest, cut: bool) -> Parsed:
    if plan.by.rendering is not None:
        return plan.by.rendering.parse(generation.token_ids, request.tools, plan.prompt, cut=cut)
    return adopted(generation.reply or Message(role="assistant"), request.tools)


def _answer(call: Call, parsed: Parsed, plan: _Plan, last: Ended) -> Answer:
    generation = last.routed.generation
    told = None if plan.by.tokenizer else generation.usage
    reply = Reply(
        call_id=call.id,
        message=parsed.message,
        finish_reason=call.finish_reason,
        prompt_tokens=told.prompt_tokens if told else len(plan.token_ids),
        sampled_tokens=told.sampled_tokens if told else len(generation.token_ids),
    )
    return Answer(
        reply=reply,
        sampled_ids=generation.token_ids,
        logprobs=generation.logprobs,
        spell=plan.by.tokenizer.token_text if plan.by.tokenizer else str,
        cached_tokens=len(plan.token_ids) - len(plan.prompt),
        stopped_by=last.stopped_by,
    )


def _ids(packed: bytes) -> list[int]:
    ids: list[int] = unpack_ids(packed).tolist()
    return ids
