"""Tools an agent acts with: the contract, and the two every task can name.

A tool never raises for what the model did wrong: that is an answer (``is_error``) the model can act
on. It raises ``InfrastructureFailure`` when the sandbox is gone.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from rollserve.errors import InvalidInput
from rollserve.sandbox.base import Sandbox


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """``text`` is what the model reads. ``answer`` set means the agent has submitted it: the episode's
    agent loop ends."""

    text: str
    is_error: bool = False
    answer: str | None = None


class Tool(Protocol):
    @property
    def schema(self) -> dict[str, Any]:
        """In OpenAI form: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

    async def call(self, arguments: dict[str, Any]) -> ToolResult: ...


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


SHELL_SCHEMA = function_schema(
    "shell",
    "Run a command in a persistent shell.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
SUBMIT_SCHEMA = function_schema(
    "submit",
    "Submit the final answer and finish.",
    {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
)
ECHO_SCHEMA = function_schema(
    "echo",
    "Answer with the text it is given.",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)


def _argument(arguments: dict[str, Any], name: str) -> str | ToolResult:
    value = arguments.get(name)
    if isinstance(value, str):
        return value
    return ToolResult(text=f"error: {name!r} must be a string", is_error=True)


class ShellTool:
    """``shell``: one command in the sandbox's persistent shell."""

    schema = SHELL_SCHEMA

    def __init__(self, sandbox: Sandbox, command_s: float) -> None:
        self._sandbox = sandbox
        self._command_s = command_s

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        command = _argument(arguments, "command")
        if isinstance(command, ToolResult):
            return command
        try:
            result = await self._sandbox.exec(command, timeout_s=self._command_s)
        except InvalidInput as error:  # a NUL byte, for one: the model wrote it, the model hears of it
            return ToolResult(text=f"error: {error}", is_error=True)
        text = result.output.rstrip("\n")
        if result.timed_out:
            note = f"[killed after {self._command_s:g} s]"
        elif result.exit_code:
            note = f"[exit code {result.exit_code}]"
        else:
            return ToolResult(text=text)
        return ToolResult(text=f"{text}\n{note}" if text else note, is_error=True)


class SubmitTool:
    """``submit``: hand in the answer and end the episode."""

    schema = SUBMIT_SCHEMA

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        answer = _argument(arguments, "answer")
        if isinstance(answer, ToolResult):
            return answer
        return ToolResult(text="submitted", answer=answer)


class EchoTool:
    """``echo``: gives back its ``text``; needs no sandbox (benches, first tries)."""

    schema = ECHO_SCHEMA

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        text = _argument(arguments, "text")
        return text if isinstance(text, ToolResult) else ToolResult(text=text)


BUILT_IN_TOOLS = ("shell", "submit", "echo")
SANDBOX_TOOLS = ("shell",)
"""Those that act in the task's sandbox."""
