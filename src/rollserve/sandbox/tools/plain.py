"""The three simplest tools: one argument each, so that the smallest model can use them."""

from __future__ import annotations

from typing import Any

from rollserve.errors import InvalidInput
from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.tools.base import ToolResult, ended, function_schema, wrong


def _one_string(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}


class Stateless:
    async def close(self) -> None:
        """Nothing is kept running."""


class ShellTool(Stateless):
    """``shell``: one command in the sandbox's own persistent shell. ``bash`` has more to it."""

    schema = function_schema("shell", "Run a command in a persistent shell.", _one_string("command"))

    def __init__(self, sandbox: Sandbox, command_s: float) -> None:
        self._sandbox = sandbox
        self._command_s = command_s

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            result = await self._sandbox.exec(arguments["command"], timeout_s=self._command_s)
        except InvalidInput as error:  # a NUL byte, for one: the model wrote it, the model hears of it
            return wrong(str(error))
        return ended(result.output, self._command_s, timed_out=result.timed_out, exit_code=result.exit_code)


class SubmitTool(Stateless):
    """``submit``: hand in the answer and end the episode."""

    schema = function_schema("submit", "Submit the final answer and finish.", _one_string("answer"))

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(text="submitted", answer=arguments["answer"])


class EchoTool(Stateless):
    """``echo``: gives back its ``text``; needs no sandbox (benches, first tries)."""

    schema = function_schema("echo", "Answer with the text it is given.", _one_string("text"))

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(text=arguments["text"])
