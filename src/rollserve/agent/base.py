"""The contract of an agent: what drives the model through one episode.

Built-in agents run in the worker and call the gateway's forward step in process. Agents of the user
(``package.module:Class``) are written against the same ``Episode`` and run in a code host, where they
can be killed; there ``tools`` and ``model`` are proxies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rollserve.records.call import Message
from rollserve.records.task import Task
from rollserve.sandbox.tools import ToolResult


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said. ``finish_reason`` is ``stop``, ``tool_calls``, ``length`` or ``abort``."""

    call_id: str
    message: Message
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int


class ModelClient(Protocol):
    """The model, through the attempt's session."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Reply:
        """One call. Send the whole conversation each time, the model's own turns as it returned
        them: it is extended token-exactly. Raises ``LimitReached`` when a budget is used up,
        ``ContextTooLong``, ``BackendError``."""


class Toolbox(Protocol):
    """The task's tools by name."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]: ...

    async def call(self, name: str, arguments: str) -> ToolResult:
        """``arguments`` is the JSON text the model wrote. An unknown name or broken arguments are an
        error *result*."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What an agent gets. ``base_url`` and ``api_key`` address the session for agents that speak
    HTTP. ``log`` keeps a line with the attempt. Time inside ``pause()`` (waiting for a slot) is not
    charged to the attempt's budgets."""

    task: Task
    tools: Toolbox
    model: ModelClient
    log: Callable[[str], None]
    base_url: str = ""
    api_key: str = ""
    pause: Callable[[], AbstractContextManager[None]] = nullcontext


class AgentResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent ended with. ``answer`` is what graders of answers read. ``truncated_by`` names
    the limit that ended it: its work is graded and marked."""

    answer: str | None = None
    truncated_by: str | None = None
    detail: dict[str, Any] = {}


class Agent(Protocol):
    """``options`` of the task's agent are passed to the constructor by keyword; a bad one raises
    ``InvalidInput`` with its field."""

    async def run(self, episode: Episode) -> AgentResult:
        """Drive one episode. Anything raised that is not an ``EpisodeFailure`` is the agent's crash."""


@dataclass(frozen=True, kw_only=True)
class AgentEntry:
    """How a name is run. ``check`` raises ``InvalidInput`` for bad options, before anything starts;
    ``hosted`` agents run in a code host."""

    name: str
    make: Callable[[dict[str, Any]], Agent]
    check: Callable[[dict[str, Any]], None]
    hosted: bool = False
    code: dict[str, str] = field(default_factory=dict)
