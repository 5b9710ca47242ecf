"""A call is recorded: in the attempt's segment, then in the tree; and what it is answered with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rollserve.agent.base import Reply
from rollserve.backend.base import Generation
from rollserve.errors import InfrastructureFailure
from rollserve.gateway import drift
from rollserve.gateway.images import placed
from rollserve.gateway.lineage import at_record
from rollserve.gateway.parsing import Parsed, adopted
from rollserve.gateway.planning import Plan
from rollserve.gateway.state import SessionState
from rollserve.gateway.stopping import Ended
from rollserve.gateway.truth import begun, inexact
from rollserve.records.call import Call, ChatRequest, Drift, Message, VersionSpan
from rollserve.records.ids import Ids


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
class Done:
    """A generation that has ended, and the call that it makes. Times are seconds since the epoch."""

    call_id: str
    last: Ended
    versions: tuple[VersionSpan, ...]
    started_at: float
    first_token_at: float | None
    finished_at: float


def record(state: SessionState, request: ChatRequest, plan: Plan, done: Done) -> Answer:
    """Make the call, append it to the segment, then to the tree; in this order. Raises
    ``InfrastructureFailure`` where it can't be written."""
    generation = done.last.routed.generation
    parsed = done.last.text(_parsed(plan, generation, request))
    sampled = Ids(generation.token_ids)
    call = _call(state, request, plan, done, parsed, sampled)
    try:
        if plan.chat is not None:
            state.images.write(call.messages, plan.chat.pictures, state.spec.segment)
        state.spec.segment.append_call(call)
    except OSError as error:
        raise InfrastructureFailure(f"can't record the call: {error}", operation="gateway.record") from error
    if generation.usage is not None and not call.sampled_ids:
        state.told_tokens += generation.usage.sampled_tokens
    _remember(state, request, plan, call, sampled, done.last.stopped_by)
    return _answer(call, parsed, plan, done.last)


def _call(
    state: SessionState, request: ChatRequest, plan: Plan, done: Done, parsed: Parsed, sampled: Ids
) -> Call:
    routed, match = done.last.routed, plan.match
    generation, mode = routed.generation, routed.info.logprobs_mode
    cause, logprobs = inexact(generation, plan.token_ids, plan.sampling, mode)
    parent_tools = match.parent.tools if match.parent else ()
    lineage = at_record(plan.tree, match, plan.lineage)
    return Call(
        id=done.call_id,
        parent=match.parent.call_id if match.parent else None,
        messages=match.new,
        tools=request.tools if request.tools != parent_tools else None,
        prompt_ids=plan.prompt.packed,
        sampled_ids=sampled.packed,
        logprobs=logprobs,
        versions=begun(done.versions, len(generation.token_ids)),
        reply=parsed.message,
        finish_reason=generation.finish_reason if _is_cut(generation) else parsed.finish,
        sampling=plan.sampling,
        asked=request.asked,
        backend=routed.backend_id,
        logprobs_mode=mode,
        constrained=plan.sampling.json_schema is not None,
        broke=match.broke,
        inexact=cause,
        label=lineage.label,
        origin=lineage.origin,
        drift=_drift(state, request, plan, generation, cause),
        policy=state.answerers.policy_name(plan.by),
        route=plan.by.route,
        extras=generation.extras,
        images=placed(match.new, plan.prompt, routed.info.image_token),
        started_at=done.started_at,
        first_token_at=done.first_token_at,
        finished_at=done.finished_at,
    )


def _drift(
    state: SessionState, request: ChatRequest, plan: Plan, generation: Generation, cause: str | None
) -> tuple[Drift, ...]:
    """Of a call that is about to be recorded; ``cause`` is why it can't be trained on."""
    rendering, found = plan.by.rendering, list[Drift]()
    match, tokenizer = plan.match, plan.by.tokenizer
    if tokenizer is None:
        return () if cause is None else (Drift(cause=cause),)
    if state.spec.run.rewrites == "exact":
        for difference in plan.tree.unseen(match):
            found += drift.absorbed(difference, tokenizer)
    node = plan.tree.get(match.broke.from_call or "") if match.broke else None
    if match.broke is not None and node is not None and plan.by.route == request.route:
        before, sampled, _ = state.context(node)
        context = [*before, *sampled]
        stops = () if rendering is None else rendering.stop_token_ids
        found.append(drift.broken(match.broke, context, plan.prompt, tokenizer, stops))
    if cause is not None:
        sampled_count, consumed = len(generation.token_ids), generation.prompt_ids
        found.append(drift.inexact(cause, plan.token_ids, consumed, sampled_count, tokenizer))
    return tuple(found)


def _remember(
    state: SessionState, request: ChatRequest, plan: Plan, call: Call, sampled: Ids, ending: str | None
) -> None:
    node = plan.tree.add(
        plan.match,
        call_id=call.id,
        reply=call.reply,
        tools=request.tools,
        prompt_ids=call.prompt_ids,
        sampled_ids=call.sampled_ids,
        label=call.label,
        ending=ending,
    )
    state.keep(node.call_id, (plan.token_ids, sampled, plan.prompt))
    state.call_ids.append(call.id)
    state.counts["turns"] += 1
    state.counts["sampled_tokens"] += len(sampled)
    state.counts["prompt_tokens"] += len(plan.prompt)
    if not plan.by.route:
        state.newest = node
    state.counts["breaks"] += call.broke is not None
    if state.answerers.trained(plan.by):
        state.counts["inexact"] += call.inexact is not None
        state.counts["rewritten"] += bool(plan.match.differences or plan.match.edited)
    if state.spec.on_call is not None:
        state.spec.on_call()


def _is_cut(generation: Generation) -> bool:
    return generation.finish_reason != "stop"


def _parsed(plan: Plan, generation: Generation, request: ChatRequest) -> Parsed:
    if plan.by.rendering is not None:
        cut = _is_cut(generation)
        return plan.by.rendering.parse(generation.token_ids, request.tools, plan.prompt.list, cut=cut)
    return adopted(generation.reply or Message(role="assistant"), request.tools)


def _answer(call: Call, parsed: Parsed, plan: Plan, last: Ended) -> Answer:
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
