"""What any agent must do. Subclass it in a test module and give it a ``subject``::

    class TestMine(AgentConformance):
        @pytest.fixture
        def subject(self) -> Agent:
            return MyAgent()

The agent has to ask the model at least once, and to answer with what it says.
"""

from __future__ import annotations

import asyncio

import pytest

from rollserve.agent.base import Agent, AgentResult
from rollserve.agent.toolbox import BuiltToolbox
from rollserve.errors import BackendUnavailable, LimitReached
from rollserve.sandbox.tools.plain import EchoTool, SubmitTool
from rollserve.testing.fakes import ScriptedModel, Turn, says, some_episode

DEADLINE_S = 30.0


class AgentConformance:
    @pytest.fixture
    async def subject(self) -> Agent:
        raise NotImplementedError

    async def _run(self, agent: Agent, *turns: Turn) -> tuple[AgentResult, ScriptedModel]:
        model = ScriptedModel(*turns)
        tools = BuiltToolbox({"echo": EchoTool(), "submit": SubmitTool()}, {})
        async with asyncio.timeout(DEADLINE_S):
            return await agent.run(some_episode(model, tools)), model

    async def test_the_models_words_are_the_answer(self, subject: Agent) -> None:
        result, _ = await self._run(subject, says("42"))
        assert isinstance(result, AgentResult)
        assert result.answer is not None
        assert "42" in result.answer
        assert result.truncated_by is None

    async def test_the_conversation_is_only_added_to(self, subject: Agent) -> None:
        turns = (says("", ("echo", '{"text": "a"}')), says("", ("nothing", "{")), says("42"))
        _, model = await self._run(subject, *turns)
        for before, after in zip(model.asked, model.asked[1:], strict=False):
            assert after[: len(before)] == before
            assert after[len(before)].role == "assistant"

    async def test_episodes_do_not_share_a_conversation(self, subject: Agent) -> None:
        _, first = await self._run(subject, says("42"))
        _, second = await self._run(subject, says("42"))
        assert first.asked == second.asked

    async def test_a_limit_is_told(self, subject: Agent) -> None:
        try:
            result, _ = await self._run(subject, LimitReached("max_turns", "64 turns"))
            told = result.truncated_by
        except LimitReached as error:
            told = error.limit
        assert told == "max_turns"

    async def test_infrastructure_is_not_hidden(self, subject: Agent) -> None:
        with pytest.raises(BackendUnavailable):
            await self._run(subject, BackendUnavailable("nothing answers"))

    async def test_a_cancel_ends_it_and_its_model_call(self, subject: Agent) -> None:
        model = ScriptedModel()
        task = asyncio.ensure_future(subject.run(some_episode(model, BuiltToolbox({}, {}))))
        async with asyncio.timeout(DEADLINE_S):
            await model.waiting.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert model.cancelled == 1
