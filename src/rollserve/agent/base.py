"""The contract of an agent: what drives the model through one episode.

Built-in agents run in the worker and call the gateway's forward step in process. Agents of the user
(``package.module:Class``) are written against the same ``Episode`` and run in a code host, where they
can be killed; there ``tools`` and ``model`` are proxies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rollserve.errors import InfrastructureFailure, LimitReached, SandboxError
from rollserve.records.call import Message
from rollserve.records.image import Image
from rollserve.records.task import Task
from rollserve.sandbox.base import Sandbox
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
        model: str | None = None,
    ) -> Reply:
        """One call. Send the whole conversation each time, the model's own turns as it returned
        them: it is extended token-exactly. ``model`` names one of the run's routes; None is its own
        policy. Raises ``LimitReached`` when a budget is used up, ``ContextTooLong``, ``BackendError``,
        ``UnknownName`` for no such route, ``InvalidInput`` for an image that was not shown."""

    async def show(
        self, data: bytes | str, media_type: str = "image/png", *, model: str | None = None
    ) -> Image | None:
        """Make an image known, so that messages of this session may hold it (``Message.images``, each with
        its place ``at`` in the content). ``data`` are its bytes, a ``data:`` URL with them as base64, or an
        ``https:`` address that the model's server fetches. None where the model takes no images; that can
        change with its backends, and ``chat`` refuses them then. Raises ``InvalidInput`` for what is no image
        or over a bound of the gateway's, ``UnknownName`` for no such route."""


class Toolbox(Protocol):
    """The task's tools by name."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]: ...

    async def call(self, name: str, arguments: str) -> ToolResult:
        """``arguments`` is the JSON text the model wrote. An unknown name or broken arguments are an
        error *result*."""


class SessionView(Protocol):
    """What an agent that can't see its own model calls may know of them (``gateway.base.Session``)."""

    @property
    def call_ids(self) -> list[str]: ...
    @property
    def trouble(self) -> LimitReached | InfrastructureFailure | None: ...
    def conversation(self) -> list[Message]: ...


def last_words(conversation: Sequence[Message]) -> str | None:
    """The last text of the model's: the answer of an agent that gives none itself."""
    texts = (message.content.strip() for message in conversation if message.role == "assistant")
    return next((text for text in reversed(list(texts)) if text), None)


async def _no_way() -> str:
    raise SandboxError("this episode has no sandbox to reach its session from", operation="agent.reach")


async def _no_fork(snapshot: str) -> Sandbox:
    raise SandboxError("this episode has no sandbox to fork", operation="agent.fork")


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What an agent gets. ``base_url`` and ``api_key`` address the session for agents that speak
    HTTP. ``log`` keeps a line with the attempt. Time inside ``pause()`` (waiting for a slot) is not
    charged to the attempt's budgets.

    For agents in the worker that run the model's client inside ``sandbox``: ``reach`` opens the way from
    there to the session and returns its base URL as seen from there; ``session`` is what it knows.

    ``sandbox`` is the task's; in a code host it is a proxy with ``exec``, ``read_file``, ``write_file``,
    ``snapshot``, ``fork`` and ``forward`` (``usercode.proxies.AgentsSandbox``). ``fork``, in the worker,
    starts another from a snapshot; it is closed with the attempt. Raises ``Conflict`` when there are too
    many."""

    task: Task
    tools: Toolbox
    model: ModelClient
    log: Callable[[str], None]
    base_url: str = ""
    api_key: str = ""
    pause: Callable[[], AbstractContextManager[None]] = nullcontext
    sandbox: Sandbox | None = None
    reach: Callable[[], Awaitable[str]] = _no_way
    fork: Callable[[str], Awaitable[Sandbox]] = _no_fork
    session: SessionView | None = None


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


def no_mounts(options: dict[str, Any]) -> dict[str, str]:
    return {}


def no_programs(options: dict[str, Any]) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class AgentEntry:
    """How a name is run. ``check`` raises ``InvalidInput`` for bad options, before anything starts;
    ``hosted`` agents run in a code host. ``mounts`` says what of this machine the agent wants to see in
    its sandbox (``SandboxSpec.mounts``), ``programs`` what must then still be found on its image's ``PATH``
    (``remedy``: how it comes there); one that ``acts_inside`` can't do without a sandbox. ``shows_pictures``:
    those of a task reach its model."""

    name: str
    make: Callable[[dict[str, Any]], Agent]
    check: Callable[[dict[str, Any]], None]
    hosted: bool = False
    acts_inside: bool = False
    shows_pictures: bool = False
    mounts: Callable[[dict[str, Any]], dict[str, str]] = no_mounts
    programs: Callable[[dict[str, Any]], tuple[str, ...]] = no_programs
    remedy: str = ""
    code: dict[str, str] = field(default_factory=dict)
