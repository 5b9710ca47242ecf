"""An agent of the user's, ``package.module:Class``: run in a code host, where it can be killed."""

from __future__ import annotations

from typing import Any

import msgspec

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import AgentFailure, ContextTooLong, EpisodeFailure, LimitReached, RollserveError
from rollserve.sandbox.tools import ToolResult
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeHosts, CodeInfo, Handlers, Use
from rollserve.usercode.sandboxes import agents_sandboxes
from rollserve.usercode.serving import decode, model_handlers


class PythonAgent:
    """What the user's class returns is the result; a limit that it let escape ends the episode with
    what there is, like the built-in agent's; whatever else it raises is its crash."""

    def __init__(self, hosts: CodeHosts, info: CodeInfo, options: dict[str, Any]) -> None:
        self._hosts = hosts
        self._info = info
        self._path = info.path
        self._options_json = msgspec.json.encode(options)

    async def run(self, episode: Episode) -> AgentResult:
        order = params.RunAgent(
            path=self._path,
            options_json=self._options_json,
            task_json=episode.task.model_dump_json().encode(),
            schemas=[dict(schema) for schema in episode.tools.schemas],
            sandbox_id=None if episode.sandbox is None else episode.sandbox.id,
            base_url=episode.base_url,
            api_key=episode.api_key,
        )
        async with (
            agents_sandboxes(episode.sandbox, episode.fork) as sandboxes,
            self._hosts.open(
                Use.AGENT,
                handlers={**episode_handlers(episode), **sandboxes},
                log=episode.log,
                pause=episode.pause,
                code=(self._info,),
            ) as host,
        ):
            try:
                return await host.call("agent", order, AgentResult, timeout_s=None)
            except LimitReached as error:
                return AgentResult(truncated_by=error.limit)
            except ContextTooLong:
                return AgentResult(truncated_by="context_tokens")
            except EpisodeFailure:
                raise
            except CodeFault as fault:
                raise AgentFailure(fault.report, operation=f"agent {self._path}") from fault
            except RollserveError as error:
                raise AgentFailure(str(error), operation=f"agent {self._path}") from error


def episode_handlers(episode: Episode) -> Handlers:
    """What the hosted agent may ask for: the model and the tools of its episode."""

    async def tool(data: bytes) -> ToolResult:
        order = decode(data, params.ToolCall)
        return await episode.tools.call(order.name, order.arguments)

    return {**model_handlers(episode.model), "tool": tool}
