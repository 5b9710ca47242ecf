"""The contract of a tool.

A tool never raises for what the model did wrong: that is an answer (``is_error``) the model can act
on. It raises ``InfrastructureFailure`` when the sandbox is gone. The toolbox has checked the arguments
against the schema before a tool sees them. Cancelling a call stops what it started.
"""

from __future__ import annotations

import shlex
from base64 import b64decode
from pathlib import PurePosixPath
from typing import Any, Protocol

import msgspec

from rollserve.errors import InvalidInput
from rollserve.sandbox.base import WORKDIR, Sandbox


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """What is no text in a tool's result: ``media_type`` (``image/png``), and the bytes as base64."""

    media_type: str
    base64: str

    @property
    def data(self) -> bytes:
        """Raises ``ValueError`` for what is no base64: a tool may attach anything."""
        return b64decode(self.base64, validate=True)


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """``text`` is what the model reads; it says of each attachment that it is there. ``answer`` set means
    the agent has submitted it: the episode's agent loop ends."""

    text: str
    is_error: bool = False
    answer: str | None = None
    attachments: tuple[Attachment, ...] = ()


class Tool(Protocol):
    @property
    def schema(self) -> dict[str, Any]:
        """In OpenAI form: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

    async def call(self, arguments: dict[str, Any]) -> ToolResult: ...

    async def close(self) -> None:
        """End what the tool keeps running in the sandbox."""


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def object_schema(required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    """Of arguments: these and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def wrong(text: str) -> ToolResult:
    """The model's mistake, told to it."""
    return ToolResult(text=f"error: {text}", is_error=True)


def shell_path(path: str) -> str:
    """``path`` of a file operation as a word of a command, wherever the shell is. Raises
    ``InvalidInput``."""
    if "\0" in path:
        raise InvalidInput("a path can't hold a NUL byte", field="path")
    place = PurePosixPath(WORKDIR) / path
    if str(place) == WORKDIR:
        return f'"${{WORKSPACE:-{WORKDIR}}}"'
    if place.is_relative_to(WORKDIR):
        return f'"${{WORKSPACE:-{WORKDIR}}}"/{shlex.quote(str(place.relative_to(WORKDIR)))}'
    return shlex.quote(str(place))


async def still_there(sandbox: Sandbox) -> None:
    """A path that can't be read and a sandbox that is gone look alike until one asks: raises
    ``SandboxError`` when it does not answer."""
    await sandbox.exec(":", timeout_s=10.0)


def ended(output: str, timeout_s: float, *, timed_out: bool, exit_code: int | None) -> ToolResult:
    """What a command printed, and how it ended where that was not well."""
    if timed_out:
        return noted(output, f"[killed after {timeout_s:g} s]", is_error=True)
    if exit_code:
        return noted(output, f"[exit code {exit_code}]", is_error=True)
    return ToolResult(text=output.rstrip("\n"))


def noted(output: str, note: str, *, is_error: bool = False) -> ToolResult:
    text = output.rstrip("\n")
    return ToolResult(text=f"{text}\n{note}" if text else note, is_error=is_error)
