"""A task: data only. What is run, where, by whom, graded how, within which bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollserve.records.base import JsonObject, Record
from rollserve.records.network import Network

PositiveS = Annotated[float, Field(gt=0, le=7 * 86400)]


Path = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
"""In a sandbox."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Value = Annotated[str, Field(pattern=r"^[^\x00]*$")]


Step = Annotated[str, Field(min_length=1, max_length=65_536, pattern=r"^[^\x00]+$")]
"""A command."""

ServerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
"""Of an MCP server: the names of its tools begin with it."""


EnforcedLimit = Literal["memory_mb", "processes", "disk_mb", "cpus"]


class Limits(Record):
    """Budgets of one attempt. Times are seconds of *active* time (queues and pauses don't count),
    save ``wall_s``, which always holds. ``disk_mb`` bounds all that is written in a sandbox, ``file_mb`` one
    file, ``cpus`` the processors it may keep busy. ``require`` names bounds that must hold for a sandbox as
    a whole: a task whose runtime can't hold them here is refused."""

    init_s: PositiveS = 120
    run_s: PositiveS = 1800
    grade_s: PositiveS = 300
    total_s: PositiveS = 3600
    wall_s: PositiveS = 4 * 3600
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 64
    max_sampled_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 131_072
    command_s: PositiveS = 120
    memory_mb: Annotated[int, Field(ge=16, le=1 << 20)] = 2048
    processes: Annotated[int, Field(ge=4, le=32768)] = 256
    file_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    disk_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 2048
    cpus: Annotated[float | None, Field(gt=0, le=4096)] = None
    require: Annotated[list[EnforcedLimit], Field(max_length=8)] = []


class TaskPicture(Record):
    """An image that is shown with a task's instruction, ``at`` characters from its beginning (without it:
    after the text). ``url`` is a ``data:`` URL with its bytes as base64, or an address that the model's
    server fetches. ``detail`` is what is asked of it (``low``, ``high``)."""

    url: Annotated[str, Field(pattern=r"^(data:image/|https?://)", max_length=8 << 20)]
    at: Annotated[int | None, Field(ge=0, le=1_000_000)] = None
    detail: Literal["low", "high"] | None = None


class AgentSpec(Record):
    """What drives the model: a registered name, or ``package.module:Class``."""

    name: Annotated[str, Field(min_length=1, max_length=256)] = "tool"
    options: JsonObject = {}


class McpServer(Record):
    """A server of tools (Model Context Protocol): a program in the sandbox (``command`` and its ``env``) that
    speaks over its stdin and stdout, or, with ``url``, over HTTP on a port of the sandbox's loopback address;
    a ``url`` alone is for one that something else starts there. ``tools`` are the ones wanted, all without
    it. A call may take ``Limits.command_s``, the start ``start_s``."""

    command: Annotated[list[Value], Field(max_length=256)] = []
    env: Annotated[dict[Variable, Value], Field(max_length=200)] = {}
    url: Annotated[str | None, Field(pattern=r"^https?://[^\s]+$", max_length=2048)] = None
    tools: Annotated[list[str] | None, Field(max_length=256)] = None
    start_s: PositiveS = 30


class GraderSpec(Record):
    """What turns the end state into a reward: a registered name, or ``package.module:function``."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    options: JsonObject = {}


class Task(Record):
    """``pictures`` are shown with ``instruction``: by agents that can, to policies that take images; another
    is refused. ``prepare`` are commands that are run once on ``image``, without a network and before
    ``files`` are there; what they leave is kept for every task with the same image and commands. ``files``
    maps a path in the sandbox (relative to its working directory, or absolute) to text. ``network`` is where
    the agent's sandbox may connect to through its proxy: nowhere, the hosts of a list, or any host of the
    public network; a grader's sandbox has none.
    ``tools`` names built-in tools (``shell``, ``submit``, …) or Python functions
    (``package.module:function``); those of ``mcp_servers`` are there as ``<server>__<tool>``.
    ``artifacts`` are paths kept from the sandbox after the run.
    ``metadata`` is echoed with the result and never read."""

    instruction: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    pictures: Annotated[list[TaskPicture], Field(max_length=64)] = []
    image: Annotated[str, Field(min_length=1, max_length=4096)] = "host"
    runtime: str | None = None
    prepare: Annotated[list[Step], Field(max_length=100)] = []
    files: Annotated[dict[Path, str], Field(max_length=1000)] = {}
    env: Annotated[dict[Variable, Value], Field(max_length=200)] = {}
    network: Network = "none"
    agent: AgentSpec = AgentSpec()
    tools: Annotated[list[str], Field(max_length=128)] = ["shell", "submit"]
    mcp_servers: Annotated[dict[ServerName, McpServer], Field(max_length=16)] = {}
    grader: GraderSpec
    limits: Limits = Limits()
    artifacts: Annotated[list[Path], Field(max_length=100)] = []
    metadata: JsonObject = {}
