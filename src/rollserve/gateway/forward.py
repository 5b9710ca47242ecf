"""The forward step: one request, one call.

Checks → wait while the policy is paused → where in the tree, prompt ids (``planning``) → generation → parse
and record (``recording``) → answer. The call is in the attempt's segment before anyone sees the end of its
answer.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from msgspec.structs import replace

from rollserve.backend.base import Chat, GenerateRequest
from rollserve.errors import (
    ContextTooLong,
    InfrastructureFailure,
    InvalidInput,
    LimitReached,
    RollserveError,
    SessionClosed,
)
from rollserve.gateway import whole
from rollserve.gateway.answerers import Answerers
from rollserve.gateway.base import Ending, SessionSpec
from rollserve.gateway.images import ImageBounds, SessionImages, refuse_images
from rollserve.gateway.node import Node
from rollserve.gateway.planning import as_consumed, planned
from rollserve.gateway.policies import PolicyState
from rollserve.gateway.recording import Answer, Done, record
from rollserve.gateway.state import SessionState
from rollserve.gateway.stopping import Hearing, Listener, ended, follow
from rollserve.records.base import new_id
from rollserve.records.call import ChatRequest

_log = structlog.get_logger(__name__)


class Conversation:
    """The calls of one session, and what it takes to make the next. ``newest`` is of the run's own policy."""

    def __init__(
        self,
        session_id: str,
        spec: SessionSpec,
        answerers: Answerers,
        bounds: ImageBounds | None = None,
    ) -> None:
        self.session_id = session_id
        self.spec = spec
        self.answerers = answerers
        self.images = SessionImages(bounds or ImageBounds())
        self._state = SessionState(spec, answerers, self.images)
        self.counts, self.call_ids = self._state.counts, self._state.call_ids
        self.ended: Ending | None = None
        self.in_flight = 0
        self.waiting = 0
        self.trouble: LimitReached | InfrastructureFailure | None = None
        self._opened = time.monotonic()

    @property
    def newest(self) -> Node | None:
        return self._state.newest

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
        if self._state.sampled_tokens >= limits.max_sampled_tokens:
            raise LimitReached("max_sampled_tokens", f"all {limits.max_sampled_tokens} tokens are used")

    async def _call(self, request: ChatRequest, listener: Listener | None, call_id: str) -> Answer:
        started_at = time.time()
        asked = self.answerers.asked(request.route)
        if not asked.policy.ready:
            if request.route or self.answerers.side is None:
                refuse_images(request, asked.policy)
            await self._wait(asked.policy)
        plan = await planned(self._state, request)
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
        finished_at = time.time()
        last = ended(plan.by.rendering, request, plan.prompt, made.routed, following)
        done = Done(
            call_id=call_id,
            last=last,
            versions=made.versions,
            started_at=started_at,
            first_token_at=following.first_token_at if following else None,
            finished_at=finished_at,
        )
        return record(self._state, request, as_consumed(plan, last.routed.generation), done)

    async def count(self, request: ChatRequest) -> int:
        """Tokens of the request's prompt; nothing is sent, and nothing recorded. Raises ``InvalidInput``, and
        ``ContextTooLong`` where there are so many that nobody counts them."""
        try:
            plan = await planned(self._state, replace(request, schema=None))
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


def session_closed(ending: Ending) -> SessionClosed:
    return SessionClosed(f"this session is over: {ending.value}", hint="no later call can succeed")


def _heard_by(chat: Chat | None, following: object) -> Chat | None:
    if chat is None or not isinstance(following, Hearing):
        return chat
    return replace(chat, hear=following.hear)
