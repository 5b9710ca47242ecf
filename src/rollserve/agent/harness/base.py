"""What a command-line harness is to rollserve: a row of facts over the agent ``command``.

A row says how the harness is told where its model is, in each dialect it speaks, how it is run once
without a person, and how it is installed. Every fact was taken from a run of the pinned version.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path as HostPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollserve.agent.command import LogBytes, ModelName, Program, Tokens, values_of
from rollserve.errors import InvalidInput
from rollserve.records.task import Path, Value, Variable

MOUNT = "/harness"
"""Where a harness of this machine is seen inside a sandbox."""


class Dialect(StrEnum):
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE_CONTENT = "generate_content"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How the harness is run in one dialect: templates, as in ``CommandOptions``."""

    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Install:
    """``npm`` or ``pip`` packages, pinned; ``entry`` is the program in the folder, run by ``runner``
    (both relative to it; no runner: it runs by itself)."""

    npm: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    entry: str
    runner: str | None = None
    python: tuple[int, int] = (3, 11)


@dataclass(frozen=True, kw_only=True)
class Harness:
    """``program`` is what must be found inside. ``wires`` by dialect, the default first. ``env`` holds in
    all. ``report`` is a file whose end goes to the log. ``ends`` says what its exit codes mean."""

    name: str
    version: str
    program: str
    install: Install
    wires: Mapping[Dialect, Wire]
    env: Mapping[str, str] = field(default_factory=dict)
    report: str | None = None
    ends: Mapping[int, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Of an installation, in the folder of installed harnesses."""
        return f"{self.name}-{self.version}"


class HarnessOptions(BaseModel):
    """``dialect`` is one the harness speaks. ``provide`` says where it comes from: ``image`` (found on the
    image's ``PATH``), ``mount`` (installed on this machine, seen read-only), or the latter where it is
    installed. ``arguments`` are added to its command line as they stand; ``env`` and ``files`` to its own.
    ``context_tokens`` is what it is told of the model's window, and so when it compacts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dialect: Dialect | None = None
    provide: Literal["auto", "image", "mount"] = "auto"
    arguments: Annotated[str, Field(max_length=10_000, pattern=r"^[^\x00]*$")] = ""
    env: Annotated[dict[Variable, Value], Field(max_length=200)] = {}
    files: Annotated[dict[Path, str], Field(max_length=200)] = {}
    answer_file: Path | None = None
    model: ModelName = "policy"
    context_tokens: Tokens = 131_072
    max_tokens: Tokens = 4096
    log_bytes: LogBytes = 262_144


def wire_of(harness: Harness, dialect: Dialect | None) -> Wire:
    """Raises ``InvalidInput`` for a dialect the harness does not speak."""
    if dialect is None:
        return next(iter(harness.wires.values()))
    if dialect not in harness.wires:
        raise InvalidInput(
            f"{harness.name} does not speak {dialect.value}",
            field="agent.options.dialect",
            hint=f"it speaks: {', '.join(each.value for each in harness.wires)}",
        )
    return harness.wires[dialect]


def is_installed(harness: Harness, folder: HostPath) -> bool:
    """In the folder of harnesses of this machine."""
    return (folder / harness.folder / "bin" / harness.program).exists()


def mounts_of(harness: Harness, options: HarnessOptions, folder: HostPath | None) -> dict[str, str]:
    """``folder`` holds the installed harnesses. Raises ``InvalidInput`` where one is wanted and is not
    there."""
    if options.provide != "image" and folder is not None and is_installed(harness, folder):
        return {MOUNT: str(folder / harness.folder)}
    if options.provide == "mount":
        raise InvalidInput(
            f"{harness.folder} is not installed on this machine",
            field="agent.options.provide",
            hint=remedy_of(harness, folder),
        )
    return {}


def remedy_of(harness: Harness, folder: HostPath | None) -> str:
    """How the harness comes into sandboxes."""
    into = "FOLDER" if folder is None else shlex.quote(str(folder))
    then = " (workers.harness_dir names FOLDER)" if folder is None else ""
    command = f"{shlex.quote(sys.executable)} -m rollserve.agent.harness.install --into {into} {harness.name}"
    return (
        f"`{command}` puts it where sandboxes of the runtime bubblewrap see it{then}; "
        f"or put {harness.program!r} on the image's PATH"
    )


def program_of(harness: Harness, options: HarnessOptions, folder: HostPath | None = None) -> Program:
    """``folder`` is named where the program is not found."""
    wire = wire_of(harness, options.dialect)
    command = f"{wire.command} {options.arguments}" if options.arguments else wire.command
    return Program(
        command=command,
        env={**harness.env, **wire.env, **options.env},
        files={**wire.files, **options.files},
        values=values_of(options.model, options.context_tokens, options.max_tokens),
        path=(f"{MOUNT}/bin",),
        needs=(harness.program,),
        remedy=remedy_of(harness, folder),
        answer_file=options.answer_file,
        report=harness.report,
        ends=harness.ends,
        log_bytes=options.log_bytes,
    )
