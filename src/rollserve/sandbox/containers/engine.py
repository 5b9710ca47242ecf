"""The command line of a container engine: what podman and docker have in common of it.

The command is the one door that both engines have, rootful and rootless, without a package more. It is needed
to start, list and remove containers; what happens in one goes over pipes of its own (``init``).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from rollserve.cancelling import uninterrupted
from rollserve.errors import SandboxError

CALL_TIMEOUT_S = 60.0
_INFO_TIMEOUT_S = 10.0
_MESSAGE_CHARS = 500


@dataclass(frozen=True)
class Facts:
    """What an engine says about itself. ``holds`` are the fields of ``SandboxLimits`` that it can bound."""

    rootless: bool
    storage: str
    holds: tuple[str, ...]


class Engine:
    """``command`` is its command with what comes before the subcommand. Calls raise ``SandboxError``."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    @property
    def name(self) -> str:
        return os.path.basename(self._command[0])

    def facts(self) -> Facts:
        """Blocking, one call. Raises ``SandboxError`` when the engine does not answer."""
        if shutil.which(self._command[0]) is None:
            raise _failed(f"there is no command {self._command[0]}")
        try:
            done = subprocess.run(
                [*self._command, "info", "--format", "{{json .}}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_INFO_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise _failed(f"{self.name} info: {error}") from error
        try:
            said = json.loads(done.stdout)
            facts = _podman_facts(said) if "host" in said else _docker_facts(said)
        except (ValueError, KeyError, TypeError):
            facts = None
        if facts is None or done.returncode != 0:
            raise _failed(f"{self.name} info: {_words(done.stderr) or 'no answer that can be read'}")
        return facts

    async def call(self, *arguments: str, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Its stdout. When this is cancelled the command is killed; what it asked for may happen."""
        process = await self._started(arguments, stdin=asyncio.subprocess.DEVNULL)
        return await self._ended(process, arguments[0], timeout_s)

    async def feed(self, *arguments: str, write: Callable[[IO[bytes]], None], timeout_s: float) -> str:
        """As ``call``, its stdin written by ``write`` in a thread; that must end when the pipe breaks."""
        reader, writer = os.pipe()
        try:
            process = await self._started(arguments, stdin=reader)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        ending = asyncio.ensure_future(self._ended(process, arguments[0], timeout_s))
        writing = asyncio.ensure_future(asyncio.to_thread(_write, write, writer))
        try:
            await asyncio.wait({ending, writing}, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not writing.done():
                ending.cancel()  # the command ends, and the pipe breaks
            await uninterrupted(asyncio.wait({writing, ending}))
        writing.result()
        return ending.result()

    async def remove(self, names: Sequence[str]) -> None:
        """Containers that are not there any more are no fault."""
        if not names:
            return
        try:
            await self.call("rm", "--force", "--volumes", *names)
        except SandboxError:
            left = await self._existing(names)
            if left:
                raise

    async def _existing(self, names: Sequence[str]) -> list[str]:
        shown = await self.call("ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Names}}")
        words = set(shown.split())
        return [name for name in names if name in words]

    async def labels(self, label: str) -> dict[str, dict[str, str]]:
        """Of each container that has ``label``, by id."""
        shown = await self.call("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={label}")
        found: dict[str, dict[str, str]] = {}
        for container in shown.split():
            try:
                said = await self.call("inspect", "--format", "{{json .Config.Labels}}", container)
            except SandboxError:
                continue  # gone in the meantime
            found[container] = json.loads(said)
        return found

    async def _started(self, arguments: Sequence[str], *, stdin: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                *arguments,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise _failed(f"{self.name} can't be started: {error}") from error

    async def _ended(self, process: asyncio.subprocess.Process, what: str, timeout_s: float) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                out, errors = await process.communicate()
        except TimeoutError:
            raise _failed(f"{self.name} {what}: no answer in {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await uninterrupted(process.wait())
        if process.returncode != 0:
            raise _failed(f"{self.name} {what}: {_words(errors)}")
        return out.decode(errors="replace")


def _write(write: Callable[[IO[bytes]], None], writer: int) -> None:
    try:
        with open(writer, "wb") as stream:
            write(stream)
    except BrokenPipeError:
        pass  # the command has ended, and says why


def _failed(message: str) -> SandboxError:
    return SandboxError(message, operation="container")


def _words(stderr: bytes) -> str:
    """The end of what was complained; warnings come first."""
    return stderr.decode(errors="replace").strip()[-_MESSAGE_CHARS:]


def _docker_facts(said: dict[str, Any]) -> Facts | None:
    if not said.get("ServerVersion"):
        return None
    fields = {"memory_mb": "MemoryLimit", "processes": "PidsLimit", "cpus": "CpuCfsQuota"}
    return Facts(
        rootless=any("rootless" in option for option in said.get("SecurityOptions") or ()),
        storage=str(said.get("Driver")),
        holds=tuple(limit for limit, field in fields.items() if said.get(field)),
    )


def _podman_facts(said: dict[str, Any]) -> Facts:
    host = said["host"]
    rootless = bool(host["security"]["rootless"])
    fields = {"memory_mb": "memory", "processes": "pids", "cpus": "cpu"}
    there = host.get("cgroupControllers") or () if host["cgroupVersion"] == "v2" or not rootless else ()
    return Facts(
        rootless=rootless,
        storage=str(said["store"]["graphDriverName"]),
        holds=tuple(limit for limit, controller in fields.items() if controller in there),
    )
