"""One generation, though updates of the weights may stop it on its way.

An update of mode *abort* ends what is in flight with what it had. The call then waits until the update is
over and goes on from those tokens, under the new weights: the ids are one answer, and the versions and
logprobs of each part are those it was sampled under.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from msgspec.structs import replace

from rollserve.backend.base import GenerateRequest, Generation, LabelSpan, Routed, TokenSink
from rollserve.errors import BackendUnavailable
from rollserve.gateway.policies import PolicyState
from rollserve.gateway.truth import version_spans
from rollserve.records.base import new_id
from rollserve.records.call import VersionSpan

FRUITLESS = 8
"""Parts in a row that a backend may stop by itself, with no token sampled and no update known."""

FIRST_REST_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a call's time is charged to (``gateway.base.ActiveClock``)."""

    pause: Callable[[], AbstractContextManager[None]]
    refundable: Callable[[], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Whole:
    """The joined generation, and the version of each of its tokens."""

    routed: Routed
    versions: tuple[VersionSpan, ...]


@dataclass(slots=True)
class _Part:
    routed: Routed
    versions: tuple[VersionSpan, ...]
    sent: Sequence[int]


class _Sink:
    """Remembers whether the caller has had enough: then an ``abort`` is no interruption."""

    def __init__(self, inner: TokenSink) -> None:
        self._inner = inner
        self.enough = False

    def __call__(self, token_ids: list[int], logprobs: list[float]) -> bool | None:
        self.enough = bool(self._inner(token_ids, logprobs)) or self.enough
        return self.enough


@dataclass(slots=True)
class _Making:
    """A generation under way. ``fruitless`` counts parts in a row that brought nothing."""

    policy: PolicyState
    budget: Budget
    parts: list[_Part] = field(default_factory=list)
    fruitless: int = 0
    sampled: list[int] = field(default_factory=list)

    async def add(self, session_id: str, request: GenerateRequest, sink: _Sink | None) -> Generation:
        before = self.policy.policy
        part = replace(
            request,
            request_id=request.request_id if not self.parts else new_id("gen"),
            token_ids=[*request.token_ids, *self.sampled] if self.sampled else request.token_ids,
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(self.sampled)),
            cache_salt=before.cache_salt,
        )
        routed = await self.policy.pool.generate(
            session_id, part, sink, pause=self.budget.pause, refundable=self.budget.refundable
        )
        if self.policy.frozen:
            with self.budget.pause():
                await self.policy.wait_thawed()
        generation, after = routed.generation, self.policy.policy
        low, high = sorted((before.version, after.version))
        # A server's label is of its whole model, whatever adapters it has.
        labels = generation.labels if routed.info.adapter_of is None else None
        spans = version_spans(labels, len(generation.token_ids), after.labels, low, high)
        self.parts.append(_Part(routed, spans, part.token_ids))
        self.sampled += generation.token_ids
        gained = bool(generation.token_ids) or before.weights != after.weights
        self.fruitless = 0 if gained else self.fruitless + 1
        return generation

    def forget(self, sink: _Sink | None) -> None:
        """An engine that renders can't go on from tokens: the answer is made again from its start. Raises
        ``BackendUnavailable`` where the caller has heard some of it."""
        if sink is not None and any(_has_text(part.routed.generation) for part in self.parts):
            message = f"backend {self.parts[-1].routed.backend_id} was stopped in the middle of an answer"
            raise BackendUnavailable(message, operation="gateway.generate")
        self.parts.clear()
        self.sampled.clear()

    async def rest(self) -> None:
        """Until it may go on; a moment, where nothing is known of an update (yet)."""
        if self.fruitless >= FRUITLESS:
            message = f"backend {self.parts[-1].routed.backend_id} stops each generation by itself"
            raise BackendUnavailable(message, operation="gateway.generate")
        with self.budget.pause():
            if self.fruitless and self.policy.ready:
                await asyncio.sleep(FIRST_REST_S * 2.0**self.fruitless)
            await self.policy.wait_ready()


async def generate(
    policy: PolicyState, session_id: str, request: GenerateRequest, sink: TokenSink | None, budget: Budget
) -> Whole:
    """``request`` without its cache salt. Raises what the pool raises, and ``BackendUnavailable`` for a
    backend that keeps stopping generations nobody wanted stopped."""
    making = _Making(policy, budget)
    told = None if sink is None else _Sink(sink)
    while True:
        generation = await making.add(session_id, request, told)
        if generation.finish_reason != "abort" or (told is not None and told.enough):
            return _joined(making.parts)
        if len(making.sampled) >= request.sampling.max_tokens:
            return _joined(making.parts, full=True)
        await making.rest()
        if request.chat is not None:
            making.forget(told)


def _has_text(generation: Generation) -> bool:
    reply = generation.reply
    return bool(generation.token_ids) or (reply is not None and bool(reply.content or reply.reasoning))


def _joined(parts: list[_Part], *, full: bool = False) -> Whole:
    last = parts[-1]
    if len(parts) == 1 and not full:
        return Whole(last.routed, last.versions)
    made = [part.routed.generation for part in parts]
    generation = Generation(
        token_ids=[token_id for one in made for token_id in one.token_ids],
        logprobs=[value for one in made for value in one.logprobs],
        finish_reason="length" if full else made[-1].finish_reason,
        prompt_ids=_prompt(parts),
        labels=_labels(made),
        extras=_extras(made),
        reply=made[-1].reply,
        usage=made[-1].usage,
    )
    inexact = next((part for part in parts if part.routed.info.logprobs_mode != "processed"), last)
    routed = Routed(generation=generation, backend_id=last.routed.backend_id, info=inexact.routed.info)
    return Whole(routed, _versions(parts))


def _prompt(parts: list[_Part]) -> list[int] | None:
    """What the backends say they consumed: of the first part, or of the first that is not what was sent
    (nothing, where that looks like the first part's, since then the sampled ids were left out)."""
    for part in parts:
        consumed = part.routed.generation.prompt_ids
        if consumed is not None and consumed != part.sent:
            return [] if consumed == parts[0].sent else consumed
    return parts[0].routed.generation.prompt_ids


def _starts(made: list[Generation]) -> list[int]:
    return [sum(len(one.token_ids) for one in made[:at]) for at in range(len(made))]


def _labels(made: list[Generation]) -> tuple[LabelSpan, ...] | None:
    """None where no part has any."""
    if all(one.labels is None for one in made):
        return None
    return tuple(
        LabelSpan(span.start + start, span.end + start, span.label)
        for one, start in zip(made, _starts(made), strict=True)
        for span in one.labels or ()
    )


def _extras(made: list[Generation]) -> dict[str, bytes]:
    """As a stream's: an array that comes again is named after the token it begins at."""
    extras: dict[str, bytes] = {}
    for one, start in zip(made, _starts(made), strict=True):
        for name, data in one.extras.items():
            extras[name if name not in extras else f"{name}.{start}"] = data
    return extras


def _versions(parts: list[_Part]) -> tuple[VersionSpan, ...]:
    starts = _starts([part.routed.generation for part in parts])
    joined: list[VersionSpan] = []
    for part, start in zip(parts, starts, strict=True):
        for span in part.versions:
            moved = replace(span, start=span.start + start, end=span.end + start)
            if joined and replace(joined[-1], end=moved.end) == replace(moved, start=joined[-1].start):
                moved = replace(moved, start=joined.pop().start)
            joined.append(moved)
    return tuple(joined)
