"""An agent of the user's, ``package.module:Class``: run in a code host, where it can be killed."""

from __future__ import annotations

from typing import Any

import msgspec

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import AgentFailure, ContextTooLong, EpisodeFailure, LimitReached, RollserveError
from rollserve.records.call import Message
from rollserve.sandbox.tools import ToolResult
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeHosts, Handlers, Use
from rollserve.usercode.serving import decode


class PythonAgent:
    """What the user's class returns is the result; a limit that it let escape ends the episode with
    what there is, like the built-in agent's; whatever else it raises is its crash."""

    def __init__(self, hosts: CodeHosts, path: str, options: dict[str, Any]) -> None:
        self._hosts = hosts
        self._path = path
        self._options_json = msgspec.json.encode(options)

    async def run(self, episode: Episode) -> AgentResult:
        order = params.RunAgent(
            path=self._path,
            options_json=self._options_json,
            task_json=episode.task.model_dump_json().encode(),
            schemas=[dict(schema) for schema in episode.tools.schemas],
            base_url=episode.base_url,
            api_key=episode.api_key,
        )
        handlers = episode_handlers(episode)
        async with self._hosts.open(
            Use.AGENT, handlers=handlers, log=episode.log, pause=episode.pause
        ) as host:
            try:
                return await host.call("agent", order, AgentResult, timeout_s=None)
            except LimitReached as error:
                return AgentResult(truncated_by=error.limit)
            except ContextTooLong:
                return AgentResult(truncated_by="context_tokens")
            except EpisodeFailure:
                raise
            except CodeFault as fault:
                episode.log(fault.report)
                raise AgentFailure(fault.report, operation=f"agent {self._path}") from fault
            except RollserveError as error:
                raise AgentFailure(str(error), operation=f"agent {self._path}") from error


def episode_handlers(episode: Episode) -> Handlers:
    """What the hosted agent may ask for: the model and the tools of its episode."""

    async def chat(data: bytes) -> object:
        order = decode(data, _Chat)
        return await episode.model.chat(order.messages, tools=order.tools, max_tokens=order.max_tokens)

    async def tool(data: bytes) -> ToolResult:
        order = decode(data, params.ToolCall)
        return await episode.tools.call(order.name, order.arguments)

    return {"chat": chat, "tool": tool}


class _Chat(msgspec.Struct, frozen=True, kw_only=True):
    """``params.Chat``, with tools as this side reads them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
