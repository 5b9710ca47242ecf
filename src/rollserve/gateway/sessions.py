"""Sessions: what a running agent holds, and the model client of agents inside the worker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollserve.agent.base import ModelClient, Reply
from rollserve.errors import InfrastructureFailure, LimitReached, SessionClosed
from rollserve.gateway.forward import Answer, Conversation, Listener
from rollserve.records.base import new_id
from rollserve.records.call import ChatRequest, Message


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
        self.model: ModelClient = InProcessModel(self)
        self._base_url = base_url
        self._on_close = on_close
        self._tasks: set[asyncio.Task[Answer]] = set()

    @property
    def model_name(self) -> str:
        return self.conversation_state.policy.policy.spec.model

    @property
    def base_url(self) -> str:
        return f"{self._base_url()}/v1"

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
        task = asyncio.create_task(self.conversation_state.forward(request, listener))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            ours = asyncio.current_task()
            if self.conversation_state.closed and not (ours and ours.cancelling()):
                raise SessionClosed("the session was closed during the call") from None
            raise

    async def close(self) -> None:
        state = self.conversation_state
        first, state.closed = not state.closed, True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        if first:
            state.policy.pool.release(self.id)
            self._on_close(self)


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


def new_session_id() -> str:
    return new_id("ses")
