"""``python``: a stateful interpreter in the sandbox, the image's own ``python3``, over pipes.

``interpreter`` runs inside. A cell that takes too long is interrupted, which keeps the state; one that
does not heed the interrupt costs the interpreter, and the next cell gets a new one.
"""

from __future__ import annotations

import asyncio
import shlex
from importlib import resources
from typing import Any

import msgspec

from rollserve.cancelling import uninterrupted
from rollserve.errors import SandboxError
from rollserve.sandbox.base import Program, Sandbox
from rollserve.sandbox.capture import Capture
from rollserve.sandbox.tools.base import (
    Attachment,
    ToolResult,
    function_schema,
    object_schema,
    still_there,
    wrong,
)

OUTPUT_BYTES = 65536
ANSWER_BYTES = 64 << 20
GRACE_S = 2.0
START_S = 30.0

_DESCRIPTION = """Run Python in a persistent interpreter: names stay between calls. The value of the last \
expression is shown, as are output and errors. matplotlib figures are kept as PNG files, which are named."""


def _schema(command_s: float) -> dict[str, Any]:
    return function_schema(
        "python",
        _DESCRIPTION,
        object_schema(
            (),
            code={"type": "string"},
            timeout_s={
                "type": "number",
                "description": f"Seconds until it is interrupted. Default and maximum: {command_s:g}.",
                "exclusiveMinimum": 0,
            },
            restart={"type": "boolean", "description": "Begin with a new interpreter; all names are lost."},
        ),
    )


class _Plot(msgspec.Struct, frozen=True):
    path: str
    png: str


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    value: str | None = None
    error: str | None = None
    interrupted: bool = False
    plots: tuple[_Plot, ...] = ()


class _Ended(Exception):
    """The interpreter is gone, or speaks no longer."""


class _Interpreter:
    """One running interpreter; ``output`` is what the code printed since it was last taken."""

    def __init__(self) -> None:
        self.output = Capture(OUTPUT_BYTES)
        self.program: Program | None = None
        self._buffer = bytearray()

    def hear(self, data: bytes) -> None:
        self.output.feed(data)

    async def ask(self, code: str) -> _Answer:
        assert self.program is not None
        await self.program.write(msgspec.json.encode({"code": code}) + b"\n")
        return await self._answer()

    async def _answer(self) -> _Answer:
        assert self.program is not None
        while (end := self._buffer.find(b"\n")) < 0:
            data = await self.program.read()
            if not data or len(self._buffer) > ANSWER_BYTES:
                raise _Ended
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return msgspec.json.decode(line, type=_Answer)
        except (msgspec.DecodeError, UnicodeError):  # the code wrote where it should not
            raise _Ended from None

    async def interrupt(self, asked: asyncio.Task[_Answer]) -> _Answer | None:
        """Its answer, if it heeds the interrupt."""
        assert self.program is not None
        self.program.interrupt()
        await asyncio.wait({asked}, timeout=GRACE_S)
        return asked.result() if asked.done() and not asked.exception() else None

    def printed(self) -> str:
        text, self.output = self.output.text().rstrip("\n"), Capture(OUTPUT_BYTES)
        return text


class PythonTool:
    """``command_s`` is the most a cell may take."""

    def __init__(self, sandbox: Sandbox, command_s: float) -> None:
        self.schema = _schema(command_s)
        self._sandbox = sandbox
        self._command_s = command_s
        self._running: _Interpreter | None = None
        self._lock = asyncio.Lock()

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        async with self._lock:
            return await self._call(arguments)

    async def _call(self, arguments: dict[str, Any]) -> ToolResult:
        if arguments.get("restart"):
            await self.close()
            if "code" not in arguments:
                return ToolResult(text="[restarted]")
        if "code" not in arguments:
            return wrong("`code` is required")
        timeout_s = min(arguments.get("timeout_s", self._command_s), self._command_s)
        running = self._running or await self._start()
        if isinstance(running, ToolResult):
            return running
        return await self._run(running, arguments["code"], timeout_s)

    async def _start(self) -> _Interpreter | ToolResult:
        """Start an interpreter, or say why there is none."""
        driver = await asyncio.to_thread(_driver)
        running = _Interpreter()
        command = f"command -v python3 >/dev/null || exit; exec python3 -u -c {shlex.quote(driver)}"
        running.program = await self._sandbox.spawn(command, on_errors=running.hear)
        self._running = running
        try:
            async with asyncio.timeout(START_S):
                await running.ask("")
        except (_Ended, TimeoutError, SandboxError):
            await self.close()
            await still_there(self._sandbox)
            said = running.printed()
            return wrong(f"python3 does not start: {said}" if said else "this sandbox has no python3")
        except BaseException:
            await uninterrupted(self.close())
            raise
        return running

    async def _run(self, running: _Interpreter, code: str, timeout_s: float) -> ToolResult:
        asked = asyncio.create_task(running.ask(code))
        try:
            await asyncio.wait({asked}, timeout=timeout_s)
            timed_out = not asked.done()
            answer = await running.interrupt(asked) if timed_out else asked.result()
        except (_Ended, SandboxError):
            return await self._lost(running, "the interpreter ended")
        except asyncio.CancelledError:
            await uninterrupted(self._stop(running, asked))
            raise
        if answer is None:
            asked.cancel()
            return await self._lost(running, f"killed after {timeout_s:g} s")
        return _told(running.printed(), answer, f"interrupted after {timeout_s:g} s" if timed_out else "")

    async def _stop(self, running: _Interpreter, asked: asyncio.Task[_Answer]) -> None:
        """A cancelled call: its cell ends, the state is kept if it heeds the interrupt."""
        if not asked.done() and await running.interrupt(asked) is None:
            asked.cancel()
            await self.close()

    async def _lost(self, running: _Interpreter, why: str) -> ToolResult:
        await self.close()
        await still_there(self._sandbox)
        text = f"{running.printed()}\n[{why}: all names are lost, the next call begins anew]"
        return ToolResult(text=text.lstrip("\n"), is_error=True)

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None and running.program is not None:
            await running.program.kill()


def _driver() -> str:
    return resources.files(__package__).joinpath("interpreter.py").read_text("utf-8")


def _told(printed: str, answer: _Answer, note: str) -> ToolResult:
    parts = [printed, answer.value or "", (answer.error or "").rstrip("\n")]
    if note:
        parts.append(f"[{note}; names are kept]")
    parts += [f"[figure: {plot.path or 'it could not be written to a file'}]" for plot in answer.plots]
    return ToolResult(
        text="\n".join(part for part in parts if part),
        is_error=answer.error is not None,
        attachments=tuple(
            Attachment(media_type="image/png", base64=plot.png) for plot in answer.plots if plot.png
        ),
    )
