"""A gateway in memory: its sessions answer at once, and generate nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollserve.agent.base import Reply
from rollserve.errors import InfrastructureFailure, LimitReached, SessionClosed
from rollserve.executor.base import PolicyView
from rollserve.gateway.base import Ending, SessionSpec
from rollserve.records.call import Message
from rollserve.records.image import Image
from rollserve.testing.journal import Hooks, Journal


class FakeModel:
    """Answers every chat with ``ok``."""

    def __init__(self, session: FakeSession) -> None:
        self._session = session

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        model: str | None = None,
    ) -> Reply:
        return await self._session.generate(list(messages))

    async def show(
        self, data: bytes | str, media_type: str = "image/png", *, model: str | None = None
    ) -> Image | None:
        return None


class FakeSession:
    def __init__(self, gateway: FakeGateway, spec: SessionSpec) -> None:
        self._gateway = gateway
        self.spec = spec
        self.id = f"session-{spec.attempt_id}"
        self.secret = f"secret-{spec.attempt_id}"
        self.base_url = "http://fake"
        self.counts = dict.fromkeys(("turns", "sampled_tokens", "prompt_tokens", "breaks", "inexact"), 0)
        self.call_ids: list[str] = []
        self.trouble: LimitReached | InfrastructureFailure | None = None
        self.stall: InfrastructureFailure | None = None
        self.ending: Ending | None = None
        self.closed = False
        self._messages: list[Message] = []

    @property
    def model(self) -> FakeModel:
        return FakeModel(self)

    def conversation(self) -> list[Message]:
        return list(self._messages)

    async def generate(self, messages: list[Message]) -> Reply:
        if self.closed:
            raise SessionClosed("the attempt has ended")
        self._gateway.generating.add(self.id)
        try:
            await self._gateway.hooks.chat()
        except InfrastructureFailure as error:
            self.trouble = error
            raise
        finally:
            self._gateway.generating.discard(self.id)
        self.counts["turns"] += 1
        self._gateway.calls += 1
        self.counts["sampled_tokens"] += 3
        self.call_ids.append(f"call-{len(self.call_ids)}")
        answer = Message(role="assistant", content="ok")
        self._messages = [*messages, answer]
        return Reply(
            call_id=self.call_ids[-1], message=answer, finish_reason="stop", prompt_tokens=5, sampled_tokens=3
        )

    async def stalled(self) -> InfrastructureFailure | None:
        await self._gateway.hooks.stalled()
        return self.stall

    async def close(self, ending: Ending = Ending.ENDED) -> None:
        await self._gateway.hooks.close_session()
        if not self.closed:
            self.closed = True
            self.ending = ending
            self._gateway.open.discard(self.id)
            self._gateway.journal(f"session.closed {self.spec.attempt_id}")


class FakeGateway:
    def __init__(self, hooks: Hooks, journal: Journal) -> None:
        self.hooks = hooks
        self.journal = journal
        self.views: list[PolicyView] = []
        self.open: set[str] = set()
        self.generating: set[str] = set()
        self.sessions: list[FakeSession] = []
        self.calls = 0

    def update_policy(self, view: PolicyView) -> None:
        self.views.append(view)

    async def open_session(self, spec: SessionSpec) -> FakeSession:
        await self.hooks.open_session()
        session = FakeSession(self, spec)
        self.open.add(session.id)
        self.sessions.append(session)
        return session

    def stats(self) -> dict[str, Any]:
        newest = {view.policy().spec.name: view.revision for view in self.views}
        return {
            "calls": self.calls,
            "policy_revisions": sum(newest.values()),
            "sessions": len(self.open),
            "backends": {"b1": {"in_flight": 0}},
        }

    async def close(self) -> None:
        return
