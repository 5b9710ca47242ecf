"""What a call goes on from, what is sent for it, and by which sampling settings."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from typing import Any

from rollserve.backend.base import Chat, Generation
from rollserve.errors import ContextTooLong, InexactTokens, InvalidInput
from rollserve.gateway import apart
from rollserve.gateway.answerers import Served
from rollserve.gateway.chatting import chat_of, gained
from rollserve.gateway.lineage import Lineage, of_request, without_break
from rollserve.gateway.node import Match, Node
from rollserve.gateway.rendering import Prior, Rendering
from rollserve.gateway.state import SessionState
from rollserve.gateway.tree import Tree
from rollserve.gateway.turns import EDITED
from rollserve.records.call import ChatRequest, SamplingParams
from rollserve.records.ids import Ids


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent, by whom it is answered, and where its call will stand. ``prompt`` are its own ids. Where
    the engine renders ``chat`` is sent, and ``token_ids`` are those that its prompt should begin with, until
    it has told which it consumed."""

    by: Served
    tree: Tree
    match: Match
    lineage: Lineage
    prompt: Ids
    token_ids: Ids
    sampling: SamplingParams
    chat: Chat | None = None


async def planned(state: SessionState, request: ChatRequest) -> Plan:
    """Raises ``ContextTooLong``, ``InexactTokens``, ``InvalidInput``."""
    tree = state.answerers.tree(request.route)
    found = tree.match(request.messages, request.tools, state.spec.run.rewrites)
    lineage = of_request(tree, found, request)
    match = without_break(tree, found, lineage)
    by, match = state.answerers.place(tree, match, lineage, request)
    _refuse_rewrites(state, by, found)
    state.images.check(request, by.policy)
    rendering = by.rendering
    if rendering is None:
        return _unrendered(state, by, tree, match, lineage, request)
    context, prompt = by.policy.context_tokens, None
    if match.parent is not None:
        prior = _prior(state, match.parent, rendering)
        prompt = await apart.extend(rendering, prior, match.new, request.tools, context)
        if prompt is None:
            cause = "thinking_stripped" if rendering.thinking == "strip" else "template"
            lineage = lineage._replace(origin=match.parent.call_id)
            match = tree.reroot(match, cause)
    if match.parent is None or prompt is None:
        prompt = await apart.render(rendering, match.new, request.tools, context)
        token_ids = prompt
    else:
        before, sampled, _ = state.context(match.parent)
        token_ids = Ids.joined(before, sampled, prompt)
    sampling = _sampling(state, by, request, len(token_ids))
    return Plan(by, tree, match, lineage, prompt, token_ids, sampling)


def _unrendered(
    state: SessionState, by: Served, tree: Tree, match: Match, lineage: Lineage, request: ChatRequest
) -> Plan:
    """Where the engine renders: it gets the model's own turns as the model gave them."""
    known, conversation = Ids(), match.new
    if match.parent is not None:
        before, sampled, _ = state.context(match.parent)
        known, conversation = Ids.joined(before, sampled), (*match.parent.conversation(), *match.new)
    sampling = _sampling(state, by, request, len(known))
    chat = chat_of(conversation, request.tools, state.images.found(conversation, request))
    return Plan(by, tree, match, lineage, Ids(), known, sampling, chat)


def as_consumed(plan: Plan, generation: Generation) -> Plan:
    """With the ids that the engine consumed, which prove that the call extends its parent: where they
    don't begin with its context it is a new root."""
    consumed = generation.prompt_ids
    if plan.chat is None or consumed is None:
        return plan
    gain, match, lineage = gained(plan.token_ids, consumed), plan.match, plan.lineage
    if gain is None:
        gain = consumed
        if match.parent is not None:
            lineage = lineage._replace(origin=match.parent.call_id)
            match = plan.tree.reroot(match, "template")
    prompt, whole = Ids(gain), Ids(consumed)
    return dataclass_replace(plan, prompt=prompt, token_ids=whole, match=match, lineage=lineage)


def _refuse_rewrites(state: SessionState, by: Served, match: Match) -> None:
    """Raises ``InexactTokens`` where the run's rule is to fail on what this request rewrites."""
    if state.spec.run.rewrites != "fail" or not (match.differences or match.edited):
        return
    if not state.answerers.trained(by):
        return
    state.counts["rewritten"] += 1
    at = match.differences[0].at if match.differences else match.broke.at_message if match.broke else 0
    causes = match.differences[0].form.causes if match.differences else (EDITED,)
    raise InexactTokens(
        f"message {at} is not what it was ({', '.join(causes)}), and the run says fail",
        operation="gateway.match",
    )


def _prior(state: SessionState, node: Node, rendering: Rendering) -> Prior:
    before, sampled, prompt = state.context(node)
    return Prior(
        prompt_ids=prompt.list,
        sampled_ids=sampled.list,
        context=lambda: [*before, *sampled],
        conversation=node.conversation() if rendering.reads_history else (node.reply,),
    )


def _sampling(state: SessionState, by: Served, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
    """The run's settings for who answers; a request can only tighten ``max_tokens``. Calls made at once
    share what is left of the token budget, and may pass it together."""
    run, limits = state.spec.run.sampling_of(by.route), state.spec.limits
    room = [run.max_tokens, limits.max_sampled_tokens - state.sampled_tokens]
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
        json_schema=_schema(by, request),
    )


def _schema(by: Served, request: ChatRequest) -> dict[str, Any] | None:
    if request.schema is not None and not by.policy.structured:
        raise InvalidInput(
            "the backends of this policy can't be held to a schema", field="schema", hint="leave it out"
        )
    return request.schema
