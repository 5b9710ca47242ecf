"""A task: data only. What is run, where, by whom, graded how, within which bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rollserve.records.base import JsonObject, Record

PositiveS = Annotated[float, Field(gt=0, le=7 * 86400)]


Path = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
"""In a sandbox."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Value = Annotated[str, Field(pattern=r"^[^\x00]*$")]


class Limits(Record):
    """Budgets of one attempt. Times are seconds of *active* time (queues and pauses don't count),
    save ``wall_s``, which always holds."""

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


class AgentSpec(Record):
    """What drives the model: a registered name, or ``package.module:Class``."""

    name: Annotated[str, Field(min_length=1, max_length=256)] = "tool"
    options: JsonObject = {}


class GraderSpec(Record):
    """What turns the end state into a reward: a registered name, or ``package.module:function``."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    options: JsonObject = {}


class Task(Record):
    """``files`` maps a path in the sandbox (relative to its working directory, or absolute) to text.
    ``tools`` names built-in tools (``shell``, ``submit``) or Python functions
    (``package.module:function``). ``artifacts`` are paths kept from the sandbox after the run.
    ``metadata`` is echoed with the result and never read."""

    instruction: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    image: Annotated[str, Field(min_length=1, max_length=4096)] = "host"
    runtime: str | None = None
    files: Annotated[dict[Path, str], Field(max_length=1000)] = {}
    env: Annotated[dict[Variable, Value], Field(max_length=200)] = {}
    agent: AgentSpec = AgentSpec()
    tools: Annotated[list[str], Field(max_length=128)] = ["shell", "submit"]
    grader: GraderSpec
    limits: Limits = Limits()
    artifacts: Annotated[list[Path], Field(max_length=100)] = []
    metadata: JsonObject = {}
