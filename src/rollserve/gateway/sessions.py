"""Sessions: what a running agent holds, and the model client of agents inside the worker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from rollserve.agent.base import ModelClient, Reply
from rollserve.dialect.base import Asked
from rollserve.errors import InfrastructureFailure, InvalidInput, LimitReached, forget_frames
from rollserve.gateway.base import Ending
from rollserve.gateway.exchanges import Exchanges
from rollserve.gateway.forward import Answer, Conversation, session_closed
from rollserve.gateway.stopping import Listener
from rollserve.records.call import ChatRequest, Message

T = TypeVar("T")


class GatewaySession:
    """``gateway.base.Session``; calls run in tasks of their own, which ``close`` ends."""

    def __init__(
        self,
        conversation: Conversation,
        base_url: Callable[[], str],
        on_close: Callable[[GatewaySession], None],
    ) -> None:
        self.id = conversation.session_id
        self.secret = secrets.token_urlsafe(32)
        self.conversation_state = conversation
        self._base_url = base_url
        self._on_close = on_close
        self._tasks = _Tasks()
        self.exchanges = Exchanges(conversation, self._tasks.own)
        self._let_go = False

    @property
    def model(self) -> ModelClient:
        """Made anew each time: one that is kept would hold the session, and the session it, until the
        collector comes by."""
        return InProcessModel(self)

    @property
    def model_name(self) -> str:
        return self.conversation_state.policy.policy.spec.model

    @property
    def base_url(self) -> str:
        return f"{self._base_url()}/s/{self.id}/v1"

    @property
    def ended(self) -> Ending | None:
        return self.conversation_state.ended

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.conversation_state.counts)

    @property
    def call_ids(self) -> list[str]:
        return list(self.conversation_state.call_ids)

    @property
    def trouble(self) -> LimitReached | InfrastructureFailure | None:
        return self.conversation_state.trouble

    def conversation(self) -> list[Message]:
        newest = self.conversation_state.tree.newest
        return [] if newest is None else newest.conversation()

    async def call(self, request: ChatRequest, listener: Listener | None = None) -> Answer:
        """One call. Cancelling the await cancels the call and waits until it has stopped; when the
        session is closed meanwhile, raises ``SessionClosed``."""
        task = self._tasks.own(self.conversation_state.forward(request, listener))
        try:
            return await task
        except asyncio.CancelledError:
            if self.ended is not None and not _is_cancelled():
                raise session_closed(self.ended) from None
            raise
        finally:
            del task  # its error holds this frame, which would hold it: a circle for the collector

    def continued(self, asked: Asked) -> Asked:
        """The request with the conversation that it goes on from. Raises ``InvalidInput`` for an answer that
        this session did not give."""
        if asked.continues is None:
            return asked
        node = self.conversation_state.tree.get(asked.continues)
        if node is None:
            raise InvalidInput(
                f"no answer of this session is named {asked.continues!r}", field="previous_response_id"
            )
        messages = (*node.conversation(), *asked.request.messages)
        return replace(asked, continues=None, request=replace(asked.request, messages=messages))

    async def stalled(self) -> InfrastructureFailure | None:
        state = self.conversation_state
        return await state.policy.pool.stalled(self.id, state.spec.limits.run_s)

    async def close(self, ending: Ending = Ending.ENDED) -> None:
        state = self.conversation_state
        state.ended = state.ended or ending
        self.exchanges.close()
        await self._tasks.end()
        if not self._let_go:
            self._let_go = True
            for served in filter(None, (state.main, state.side)):
                served.policy.pool.release(self.id)
            self._on_close(self)
            forget_frames(state.trouble)


class _Tasks:
    """What a session runs, and ends with it."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def end(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


class InProcessModel:
    """The model for agents in this process: no HTTP, no JSON."""

    def __init__(self, session: GatewaySession) -> None:
        self._session = session

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Reply:
        request = ChatRequest(
            messages=tuple(map(_storable, messages)),
            tools=tuple(tool if isinstance(tool, dict) else dict(tool) for tool in tools),
            asked={} if max_tokens is None else {"max_tokens": max_tokens},
        )
        return (await self._session.call(request)).reply


def _is_cancelled() -> bool:
    """Whether somebody cancels the task that asks."""
    ours = asyncio.current_task()
    return ours is not None and ours.cancelling() > 0


def _storable(message: Message) -> Message:
    """Output of tools may hold lone surrogates, which have no UTF-8; U+FFFD stands for them. Equal
    messages stay equal, so that the conversation is recognised next time."""
    if message.content.isascii():
        return message
    try:
        message.content.encode()
    except UnicodeEncodeError:
        clean = message.content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return msgspec.structs.replace(message, content=clean)
    return message
