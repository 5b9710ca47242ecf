"""``bash``: persistent shells by name, each a console of the sandbox.

A call starts a command, or speaks to the one that runs: more waiting, input, an interrupt. Without
``wait_s`` a call lasts until the command ends or its time is up, and then the command is killed and the
shell kept. With it, the call comes back and the command goes on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from rollserve.errors import Conflict, InvalidInput
from rollserve.sandbox.base import Console, Sandbox
from rollserve.sandbox.tools.base import ToolResult, ended, function_schema, noted, object_schema, wrong

MAX_SESSIONS = 8
MAIN = "main"
END_OF_INPUT = "\x04"
LOOK_S = 1.0
"""How long a call that only speaks to a running command waits for what comes of it."""

_DESCRIPTION = """Run a command in a persistent bash shell: directory, environment and background jobs \
(`command &`) stay between calls. A command that runs longer than `timeout_s` is killed; the shell goes on. \
To speak to a program while it runs, start it with `wait_s`: the call returns after that time at the latest \
and the command goes on; then call with `input`, with `interrupt`, or with `wait_s` alone to wait on."""


def _schema(command_s: float) -> dict[str, Any]:
    return function_schema(
        "bash",
        _DESCRIPTION,
        object_schema(
            (),
            command={"type": "string", "description": "What to run. Leave out to speak to what runs."},
            session={
                "type": "string",
                "description": f"Name of the shell, made when first named. Default: {MAIN}.",
                "minLength": 1,
                "maxLength": 64,
            },
            timeout_s={
                "type": "number",
                "description": f"Seconds until the command is killed. Default and maximum: {command_s:g}.",
                "exclusiveMinimum": 0,
            },
            wait_s={
                "type": "number",
                "description": "Return after this many seconds even if the command still runs.",
                "minimum": 0,
            },
            input={
                "type": "string",
                "description": "Text for its stdin, newline included; \\u0004 at the end closes it.",
            },
            interrupt={"type": "boolean", "description": "Press Ctrl-C in what runs."},
            restart={"type": "boolean", "description": "End the shell with all it started, and begin anew."},
        ),
    )


@dataclass
class _Session:
    """``told`` is off while what became of the last command has yet to be said."""

    console: Console
    timeout_s: float
    told: bool = True


class BashTool:
    """``command_s`` is the most a command may take."""

    def __init__(self, sandbox: Sandbox, command_s: float) -> None:
        self.schema = _schema(command_s)
        self._sandbox = sandbox
        self._command_s = command_s
        self._sessions: dict[str, _Session] = {}
        self._opening = asyncio.Lock()

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        name = arguments.get("session", MAIN)
        command = arguments.get("command")
        if arguments.get("restart"):
            await self._end(name)
            if command is None:
                return ToolResult(text=f"[shell {name!r} restarted]")
        session = await self._session(name)
        if session is None:
            return wrong(f"there are {MAX_SESSIONS} shells already: use one of {sorted(self._sessions)}")
        if command is None:
            return await self._speak(name, session, arguments)
        if session.console.running:
            return wrong(
                f"a command is running in shell {name!r}: wait for it (`wait_s`), send `input`, `interrupt` "
                "or `restart` it, or use another `session`"
            )
        return await self._run(name, session, command, arguments)

    async def _session(self, name: str) -> _Session | None:
        """The one of that name, made if need be; none where there are too many."""
        async with self._opening:
            if name not in self._sessions and len(self._sessions) < MAX_SESSIONS:
                console = await self._sandbox.open_console()
                self._sessions[name] = _Session(console, self._command_s)
            return self._sessions.get(name)

    async def _run(self, name: str, session: _Session, command: str, arguments: dict[str, Any]) -> ToolResult:
        console, wait_s, given = session.console, arguments.get("wait_s"), arguments.get("input")
        before = "" if session.told else f"[before] {(await self._look(name, session, 0)).text}\n"
        session.timeout_s = min(arguments.get("timeout_s", self._command_s), self._command_s)
        takes_input = wait_s is not None or given is not None
        try:
            await console.begin(command, timeout_s=session.timeout_s, takes_input=takes_input)
        except (Conflict, InvalidInput) as error:
            return wrong(str(error))
        if given is not None:
            _type(console, given)
        if wait_s is None and takes_input:  # nobody will be able to type more
            console.end_input()
        result = await self._look(name, session, wait_s)
        return msgspec.structs.replace(result, text=before + result.text)

    async def _speak(self, name: str, session: _Session, arguments: dict[str, Any]) -> ToolResult:
        console = session.console
        acts = "input" in arguments or arguments.get("interrupt")
        if session.told or (acts and not console.running):
            said = (await self._look(name, session, 0)).text
            return ToolResult(text=f"{said}\n[nothing is running in shell {name!r}]".strip(), is_error=True)
        if arguments.get("interrupt"):
            console.interrupt()
        if "input" in arguments:
            _type(console, arguments["input"])
        result = await self._look(name, session, arguments.get("wait_s", LOOK_S))
        if arguments.get("interrupt") and not session.told:
            return msgspec.structs.replace(
                result, text=f"{result.text} [Ctrl-C did not end it; `restart` does]"
            )
        return result

    async def _look(self, name: str, session: _Session, wait_s: float | None) -> ToolResult:
        state = await session.console.look(wait_s)
        session.told = not state.running
        if state.running:
            return noted(state.output, f"[still running in shell {name!r}]")
        return ended(state.output, session.timeout_s, timed_out=state.timed_out, exit_code=state.exit_code)

    async def _end(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            await session.console.close()

    async def close(self) -> None:
        for name in list(self._sessions):
            await self._end(name)


def _type(console: Console, text: str) -> None:
    console.type(text.removesuffix(END_OF_INPUT).encode("utf-8", "surrogateescape"))
    if text.endswith(END_OF_INPUT):
        console.end_input()
