"""What a user of the service might write: an agent over HTTP, one that crashes, a grader, a tool."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from rollserve.agent.base import AgentResult, Episode
from rollserve.grader.base import Grading
from rollserve.records.call import Message


class OpenAIAgent:
    """Drives the model with the official client, through the session's address."""

    def __init__(self, temperature: float = 0.3) -> None:
        self._temperature = temperature

    async def run(self, episode: Episode) -> AgentResult:
        messages: list[Any] = [{"role": "user", "content": episode.task.instruction}]
        tools: list[Any] = list(episode.tools.schemas)
        async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
            while True:
                answer = await client.chat.completions.create(
                    model="any",
                    messages=messages,
                    tools=tools,
                    temperature=self._temperature,
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return AgentResult(answer=message.content)
                for call in message.tool_calls:
                    assert call.type == "function"
                    result = await episode.tools.call(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})


class Crasher:
    async def run(self, episode: Episode) -> AgentResult:
        raise RuntimeError("the agent has a bug")


class Leaver:
    """Hands its session to a process of its own, and ends once that has used it."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    async def run(self, episode: Episode) -> AgentResult:
        address = {"base_url": episode.base_url, "api_key": episode.api_key}
        (self._folder / "writing").write_text(json.dumps(address))
        (self._folder / "writing").rename(self._folder / "session")
        while not (self._folder / "used").exists():
            await asyncio.sleep(0.05)
        return AgentResult(answer="42")


class Spinner:
    async def run(self, episode: Episode) -> AgentResult:
        while True:
            time.sleep(0)  # noqa: ASYNC251  # never gives the loop back


def half(grading: Grading) -> float:
    return 0.5 if grading.answer else 0.0


def broken(grading: Grading) -> float:
    raise ValueError("the grader has a bug")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Chatter:
    """Says three things, whatever comes back, cut short or not."""

    async def run(self, episode: Episode) -> AgentResult:
        messages = [Message(role="user", content=episode.task.instruction)]
        for _ in range(3):
            reply = await episode.model.chat(messages, tools=episode.tools.schemas)
            messages += [reply.message, Message(role="user", content="go on")]
        return AgentResult(answer="")
