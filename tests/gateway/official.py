"""The providers' own clients, each saying the same things: what they get is told in the same words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import anthropic
import httpx
import openai
from google import genai
from google.genai import types
from openai.lib.streaming.chat import ChatCompletionStreamState

from rollserve.gateway.sessions import GatewaySession

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
MODEL = "m"


@dataclass
class Said:
    """``calls`` are names and arguments. ``ended``: in the provider's own word."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ended: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0


class Talk(Protocol):
    """A conversation that begins with ``hi`` and has one tool, ``shell``."""

    refused: type[Exception]
    """What a 400 is raised as."""
    unavailable: type[Exception]

    async def say(self, *, stream: bool = False, **settings: Any) -> Said:
        """One call; the answer is kept for ``results``. ``stop`` and ``n`` are the provider's words."""

    def results(self, *outputs: str) -> None:
        """Answer the tool calls of the last answer."""

    async def models(self) -> list[str]: ...

    async def close(self) -> None: ...


class Chat:
    refused: type[Exception] = openai.BadRequestError
    unavailable: type[Exception] = openai.InternalServerError

    def __init__(self, session: GatewaySession) -> None:
        self.client = openai.AsyncOpenAI(
            api_key=session.secret,
            base_url=session.base_url,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=False, timeout=30),
        )
        self.messages: list[Any] = [{"role": "user", "content": "hi"}]

    async def say(self, *, stream: bool = False, **settings: Any) -> Said:
        tool = {"type": "function", "function": {"name": "shell", "parameters": PARAMETERS}}
        wanted: dict[str, Any] = {"model": MODEL, "messages": self.messages, "tools": [tool], **settings}
        if stream:
            with_usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            state: Any = ChatCompletionStreamState()
            async for chunk in await self.client.chat.completions.create(**wanted, **with_usage):
                state.handle_chunk(chunk)
            answer: Any = state.current_completion_snapshot
        else:
            answer = await self.client.chat.completions.create(**wanted)
        choice = answer.choices[0]
        self.messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        calls = choice.message.tool_calls or []
        return Said(
            text=choice.message.content or "",
            reasoning=(choice.message.model_extra or {}).get("reasoning_content", ""),
            calls=[(call.function.name, _json(call.function.arguments)) for call in calls],
            ended=choice.finish_reason,
            prompt_tokens=answer.usage.prompt_tokens,
            sampled_tokens=answer.usage.completion_tokens,
        )

    def results(self, *outputs: str) -> None:
        for call, output in zip(self.messages[-1]["tool_calls"], outputs, strict=True):
            call["function"].pop("parsed_arguments", None)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})

    async def models(self) -> list[str]:
        return [model.id async for model in self.client.models.list()]

    async def close(self) -> None:
        await self.client.close()


class Responses(Chat):
    def __init__(self, session: GatewaySession) -> None:
        super().__init__(session)
        self.last: Any = None

    async def say(self, *, stream: bool = False, **settings: Any) -> Said:
        tool = {"type": "function", "name": "shell", "parameters": PARAMETERS, "strict": False}
        wanted: dict[str, Any] = {"model": MODEL, "input": self.messages, "tools": [tool], **settings}
        if stream:
            answer: Any = None
            async for event in await self.client.responses.create(**wanted, stream=True):
                if event.type in ("response.completed", "response.incomplete", "response.failed"):
                    answer = event.response
            if answer.status == "failed":
                raise RuntimeError(answer.error.message)
        else:
            answer = await self.client.responses.create(**wanted)
        self.last = answer
        items = [item.model_dump(exclude_none=True) for item in answer.output]
        for item in items:
            item.pop("parsed_arguments", None)
        self.messages += items
        reasoning = [part.text for item in answer.output if item.type == "reasoning" for part in item.summary]
        return Said(
            text=answer.output_text,
            reasoning="".join(reasoning),
            calls=[(i.name, _json(i.arguments)) for i in answer.output if i.type == "function_call"],
            ended=answer.status,
            prompt_tokens=answer.usage.input_tokens,
            sampled_tokens=answer.usage.output_tokens,
        )

    def results(self, *outputs: str) -> None:
        calls = [item for item in self.last.output if item.type == "function_call"]
        for call, output in zip(calls, outputs, strict=True):
            self.messages.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


class Messages:
    refused: type[Exception] = anthropic.BadRequestError
    unavailable: type[Exception] = anthropic.InternalServerError

    def __init__(self, session: GatewaySession) -> None:
        self.client = anthropic.AsyncAnthropic(
            api_key=session.secret,
            base_url=session.base_url.removesuffix("/v1"),
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(verify=False, timeout=30),
        )
        self.messages: list[Any] = [{"role": "user", "content": "hi"}]

    def _wanted(self) -> dict[str, Any]:
        tool = {"name": "shell", "input_schema": PARAMETERS}
        return {"model": MODEL, "messages": self.messages, "tools": [tool]}

    async def say(self, *, stream: bool = False, **settings: Any) -> Said:
        wanted = {"max_tokens": 1000, **self._wanted(), **settings}
        if stream:
            async with self.client.messages.stream(**wanted) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await self.client.messages.create(**wanted)
        self.messages.append({"role": "assistant", "content": [b.model_dump() for b in answer.content]})
        return Said(
            text="".join(block.text for block in answer.content if block.type == "text"),
            reasoning="".join(block.thinking for block in answer.content if block.type == "thinking"),
            calls=[(block.name, block.input) for block in answer.content if block.type == "tool_use"],
            ended=answer.stop_reason,
            prompt_tokens=answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0),
            sampled_tokens=answer.usage.output_tokens,
        )

    def results(self, *outputs: str) -> None:
        calls = [block for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
        pairs = list(zip(calls, outputs, strict=True))[::-1]  # Claude Code gives them in another order
        content = [{"type": "tool_result", "tool_use_id": c["id"], "content": text} for c, text in pairs]
        self.messages.append({"role": "user", "content": content})

    async def count(self) -> int:
        return (await self.client.messages.count_tokens(**self._wanted())).input_tokens

    async def models(self) -> list[str]:
        return [model.id async for model in self.client.models.list()]

    async def close(self) -> None:
        await self.client.close()


class GenerateContent:
    refused: type[Exception] = genai.errors.ClientError
    unavailable: type[Exception] = genai.errors.ServerError

    def __init__(self, session: GatewaySession) -> None:
        self._http = httpx.AsyncClient(verify=False, timeout=30)
        options = types.HttpOptions(
            base_url=session.base_url.removesuffix("/v1"),
            api_version="v1beta",
            httpx_async_client=self._http,
        )
        self.client = genai.Client(api_key=session.secret, http_options=options).aio
        self.contents: list[Any] = [{"role": "user", "parts": [{"text": "hi"}]}]

    async def say(self, *, stream: bool = False, **settings: Any) -> Said:
        declared = {"name": "shell", "parameters_json_schema": PARAMETERS}
        config: Any = {
            "tools": [{"function_declarations": [declared]}],
            "automatic_function_calling": {"disable": True},
            "thinking_config": {"include_thoughts": True},
            **settings,
        }
        parts, last = [], None
        wanted: dict[str, Any] = {"model": MODEL, "contents": self.contents, "config": config}
        if stream:
            async for chunk in await self.client.models.generate_content_stream(**wanted):
                parts += _parts(chunk)
                last = chunk
        else:
            last = await self.client.models.generate_content(**wanted)
            parts = _parts(last)
        assert last is not None
        assert last.candidates is not None
        assert last.usage_metadata is not None
        sent_back = [part.model_dump(exclude_none=True) for part in parts]
        self.contents.append({"role": "model", "parts": sent_back})
        calls = [part.function_call for part in parts if part.function_call]
        usage = last.usage_metadata
        return Said(
            text="".join(part.text for part in parts if part.text and not part.thought),
            reasoning="".join(part.text for part in parts if part.text and part.thought),
            calls=[(call.name or "", call.args or {}) for call in calls],
            ended=str(last.candidates[0].finish_reason),
            prompt_tokens=usage.prompt_token_count or 0,
            sampled_tokens=(usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0),
        )

    def results(self, *outputs: str) -> None:
        calls = [part["function_call"] for part in self.contents[-1]["parts"] if "function_call" in part]
        answers = [
            {"function_response": {"name": call["name"], "id": call.get("id"), "response": {"output": text}}}
            for call, text in zip(calls, outputs, strict=True)
        ]
        self.contents.append({"role": "user", "parts": answers})

    async def count(self) -> int:
        contents: Any = self.contents
        counted = await self.client.models.count_tokens(model=MODEL, contents=contents)
        return counted.total_tokens or 0

    async def models(self) -> list[str]:
        pager = await self.client.models.list(config={"query_base": True})
        return [(model.name or "").removeprefix("models/") async for model in pager]

    async def close(self) -> None:
        await self._http.aclose()


TALKS: dict[str, Any] = {
    "chat": Chat,
    "responses": Responses,
    "messages": Messages,
    "generate_content": GenerateContent,
}


@asynccontextmanager
async def talking(name: str, session: GatewaySession) -> AsyncIterator[Any]:
    talk = TALKS[name](session)
    try:
        yield talk
    finally:
        await talk.close()


def _json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def _parts(answer: Any) -> list[Any]:
    candidates = answer.candidates or []
    return list((candidates[0].content.parts or []) if candidates and candidates[0].content else [])
