"""The built-in agent ``tool``: ask the model, run the tools it calls, until it answers.

A turn without a tool call is the answer; so is what the ``submit`` tool is given. What the model does
wrong (an unknown tool, broken arguments) comes back to it as an error it can act on. Running into a
limit ends the episode with what there is, marked. What tools attach is shown to models that take images.
"""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from rollserve.agent.base import AgentResult, Episode, Reply
from rollserve.agent.pictures import instruction_message, shown
from rollserve.errors import BackendError, ContextTooLong, LimitReached
from rollserve.records.call import Message, ToolCall
from rollserve.sandbox.tools import ToolResult

GO_ON = "Go on. Call a tool, or call `submit` with your answer when you are done."


class ToolAgentOptions(BaseModel):
    """``system`` is the system prompt. A tool's output is cut to ``max_tool_output_chars``, its
    middle left out. A conversation holds ``max_images`` at most, the task's included: what tools attach
    after that is named, and not shown. With ``stop_on_text`` off, a turn without a tool call is answered
    with a nudge, and only ``submit`` or a limit ends the episode."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system: Annotated[str | None, Field(max_length=1_000_000)] = None
    max_tool_output_chars: Annotated[int, Field(ge=64, le=10_000_000)] = 16_384
    max_images: Annotated[int, Field(ge=0, le=10_000)] = 100
    stop_on_text: bool = True


class ToolAgent:
    def __init__(self, options: ToolAgentOptions) -> None:
        self._options = options

    async def run(self, episode: Episode) -> AgentResult:
        messages = await self._opening(episode)
        said: str | None = None
        while True:
            try:
                reply = await episode.model.chat(messages, tools=episode.tools.schemas)
            except LimitReached as error:
                return AgentResult(answer=said, truncated_by=error.limit)
            except ContextTooLong:
                return AgentResult(answer=said, truncated_by="context_tokens")
            messages.append(reply.message)
            said = reply.message.content.strip() or said
            if reply.message.tool_calls:
                answer = await self._act(episode, reply.message.tool_calls, messages)
                if answer is not None:
                    return AgentResult(answer=answer)
            elif (end := self._end(reply, said)) is not None:
                return end
            else:
                messages.append(Message(role="user", content=GO_ON))

    async def _opening(self, episode: Episode) -> list[Message]:
        user = await instruction_message(episode.task, episode.model)
        if self._options.system is None:
            return [user]
        return [Message(role="system", content=self._options.system), user]

    def _end(self, reply: Reply, said: str | None) -> AgentResult | None:
        """What a turn without a tool call ends the episode with, if it does."""
        if reply.finish_reason == "abort":
            raise BackendError("the generation was aborted", operation="model.chat")
        if reply.finish_reason == "length":
            return AgentResult(answer=said, truncated_by="max_tokens")
        if self._options.stop_on_text:
            return AgentResult(answer=reply.message.content.strip())
        return None

    async def _act(
        self, episode: Episode, calls: tuple[ToolCall, ...], messages: list[Message]
    ) -> str | None:
        """Run the calls of one turn in their order; the submitted answer, if one did."""
        for call in calls:
            if call.error is None:
                result = await episode.tools.call(call.name, call.arguments)
            else:
                result = ToolResult(text=f"error: {call.error}", is_error=True)
            if result.answer is not None:
                return result.answer
            messages.append(await self._told(episode, call, result, messages))
        return None

    async def _told(
        self, episode: Episode, call: ToolCall, result: ToolResult, before: list[Message]
    ) -> Message:
        text = cut(result.text, self._options.max_tool_output_chars)
        left = self._options.max_images - sum(len(message.images) for message in before)
        images = await shown(result, episode.model, most=left, log=episode.log)
        return Message(
            role="tool",
            content=text,
            tool_call_id=call.id,
            name=call.name,
            images=tuple(replace(image, at=len(text)) for image in images),
        )


def cut(text: str, limit_chars: int) -> str:
    """``text`` with its middle left out where it is longer than ``limit_chars``."""
    if len(text) <= limit_chars:
        return text
    head, tail = limit_chars - limit_chars // 2, limit_chars // 2
    return f"{text[:head]}\n[… {len(text) - limit_chars} characters left out …]\n{text[-tail:]}"
