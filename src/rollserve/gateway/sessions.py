"""Sessions: what a running agent holds, and the model client of agents inside the worker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from msgspec.structs import replace

from rollserve.agent.base import ModelClient, Reply
from rollserve.dialect.base import Asked
from rollserve.dialect.images import Content, Pictures
from rollserve.errors import (
    InfrastructureFailure,
    InvalidInput,
    LimitReached,
    UnknownName,
    forget_frames,
    listed,
)
from rollserve.gateway.answerers import OWN
from rollserve.gateway.base import Ending
from rollserve.gateway.exchanges import Exchanges
from rollserve.gateway.forward import Conversation, session_closed
from rollserve.gateway.recording import Answer
from rollserve.gateway.stopping import Listener
from rollserve.records.call import ChatRequest, Message
from rollserve.records.image import Image, split_at_images

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
    def model_names(self) -> list[str]:
        """What may be asked for: the run's own model, where there is one, and its routes."""
        answerers = self.conversation_state.answerers
        own = [] if answerers.own is None else [answerers.own.policy.policy.spec.model]
        return own + answerers.routes

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
        newest = self.conversation_state.newest
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
        node = self.conversation_state.answerers.find(asked.continues)
        if node is None:
            raise InvalidInput(
                f"no answer of this session is named {asked.continues!r}", field="previous_response_id"
            )
        messages = (*node.conversation(), *asked.request.messages)
        return replace(asked, continues=None, request=replace(asked.request, messages=messages))

    def route_of(self, model: str) -> str:
        """The route that a program asks for by ``model``. Any other name is the run's own: programs have
        names of their own for what they ask."""
        return model if model in self.conversation_state.answerers.routes else OWN

    def route_named(self, model: str | None) -> str:
        """The same for code written for the run, whose unknown names are mistakes. Raises ``UnknownName``."""
        own = self.conversation_state.answerers.own
        if model is None and own is None:
            hint = listed(self.model_names)
            raise InvalidInput("name the route: a grader has no policy of its own", field="model", hint=hint)
        if model is None or (own is not None and model == own.policy.policy.spec.model):
            return OWN
        if model not in self.conversation_state.answerers.routes:
            raise UnknownName("model", model, self.model_names, field="model", list_all=True)
        return model

    def routed(self, asked: Asked) -> Asked:
        """The request with its route, and a model's name where it has none."""
        route = self.route_of(asked.model)
        request = replace(asked.request, route=route) if route else asked.request
        return replace(asked, model=asked.model or self.model_names[0], request=request)

    async def stalled(self) -> InfrastructureFailure | None:
        state = self.conversation_state
        pools = dict.fromkeys(served.policy.pool for served in state.answerers)
        found = await asyncio.gather(*(pool.stalled(self.id, state.spec.limits.run_s) for pool in pools))
        return next(filter(None, found), None)

    async def close(self, ending: Ending = Ending.ENDED) -> None:
        state = self.conversation_state
        state.ended = state.ended or ending
        self.exchanges.close()
        await self._tasks.end()
        if not self._let_go:
            self._let_go = True
            for served in state.answerers:
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

    async def show(
        self, data: bytes | str, media_type: str = "image/png", *, model: str | None = None
    ) -> Image | None:
        state = self._session.conversation_state
        if not state.answerers.asked(self._session.route_named(model)).policy.sees:
            return None
        pictures = Pictures()
        if isinstance(data, str):
            image = await asyncio.to_thread(pictures.of_address, data, "data", "data")
        else:
            image = await asyncio.to_thread(pictures.of_bytes, data, media_type, "data", "media_type")
        state.images.show(pictures.found)
        return image

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        model: str | None = None,
    ) -> Reply:
        request = ChatRequest(
            messages=tuple(map(_storable, messages)),
            tools=tuple(tool if isinstance(tool, dict) else dict(tool) for tool in tools),
            asked={} if max_tokens is None else {"max_tokens": max_tokens},
            pictures=self._session.conversation_state.images.shown(messages),
            route=self._session.route_named(model),
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
        made = Content()
        for text, image in zip_longest(split_at_images(message.content, message.images), message.images):
            made.add(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            if image is not None:
                made.add(image)
        content, images = made.take()
        return replace(message, content=content, images=images)
    return message
