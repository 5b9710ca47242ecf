"""The contract of a sandbox runtime: a *runtime* makes sandboxes, a *sandbox* is acted in.

Every implementation passes ``rollserve.testing.runtime_conformance``. Paths inside a sandbox are
absolute, or relative to its working directory (``/workspace``). Every call has a deadline; cancelling
an awaited call stops what it started in the sandbox before the cancellation is passed on.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, runtime_checkable

import msgspec

WORKDIR = "/workspace"
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Ability = Literal["listen", "connect", "snapshot", "dial"]


def exports(env: Mapping[str, str]) -> str:
    """A command that gives a shell these variables, and all that it starts. A name that the shell keeps for
    itself keeps its value."""
    return "\n".join(f"export {name}={shlex.quote(value)} 2>/dev/null || :" for name, value in env.items())


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Per-sandbox bounds. A runtime says in its ``RuntimeReport`` which it can enforce.

    ``disk_mb`` bounds all that is written in a sandbox, ``file_mb`` one file. ``cpus`` is how many
    processors' time it may take in a stretch, ``cpu_s`` the seconds of one process."""

    memory_mb: int = 2048
    processes: int = 256
    file_mb: int = 512
    disk_mb: int = 2048
    cpus: float | None = None
    cpu_s: int | None = None


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start: an image, files laid down before anything runs, environment, bounds.

    ``sockets`` maps a path inside (below ``/tmp`` works for every image) to the path of a Unix socket
    of the host that is bound there. ``mounts`` maps a path inside (at the top, as ``/harness``, works for
    every image) to a folder of the host that is seen there, read-only. What a task says reaches neither.
    ``prepare`` are commands run once on the image, without a network, before anybody starts from it.
    ``snapshot``, what ``Sandbox.snapshot`` of the same runtime returned, is started from rather than those.
    """

    image: str = "host"
    prepare: tuple[str, ...] = ()
    files: dict[str, bytes] = {}
    env: dict[str, str] = {}
    limits: SandboxLimits = SandboxLimits()
    sockets: dict[str, str] = {}
    mounts: dict[str, str] = {}
    snapshot: str = ""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one command did.

    ``output`` is stdout and stderr in the order written, decoded as UTF-8 with ``backslashreplace``;
    past the cap its middle is elided and ``elided_bytes`` says how much. ``exit_code`` is ``None``
    when the command was killed at its time-out (``timed_out``).
    """

    output: str
    exit_code: int | None
    timed_out: bool = False
    elided_bytes: int = 0
    duration_s: float = 0.0


class ConsoleState(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a console's command so far. ``output`` is what came since the last look, as in
    ``ExecResult``, with its middle elided past 64 KiB; ``running`` means it goes on. ``exit_code`` is
    ``None`` as long as it runs, when it was killed at its time-out (``timed_out``), and when there is no
    command."""

    output: str
    running: bool = False
    exit_code: int | None = None
    timed_out: bool = False
    elided_bytes: int = 0


class RuntimeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime can do on this machine. ``enforces`` names the fields of ``SandboxLimits`` that hold
    for a sandbox as a whole, ``per_process`` those that hold for each of its processes or files by itself.
    ``can`` names the calls of ``Sandbox`` that not every runtime has; and ``dial`` where what is inside
    reaches an address of a network, by which it comes to its session as others do by ``listen``."""

    name: str
    usable: bool
    isolated: bool
    detail: str = ""
    remedy: str = ""
    enforces: tuple[str, ...] = ()
    per_process: tuple[str, ...] = ()
    can: tuple[Ability, ...] = ()


class Program(Protocol):
    """A program that runs in a sandbox beside its shell, spoken to over pipes."""

    async def read(self) -> bytes:
        """The next of what it writes to stdout, as it comes; ``b""`` once it has closed it. All it wrote
        to stderr before has been handed over by then. Raises ``SandboxError`` when it was ended from here,
        or the sandbox is gone. One reader at a time."""

    async def write(self, data: bytes) -> None:
        """To its stdin; returns when the pipe has taken all. Raises ``SandboxError`` when it no longer
        reads."""

    def end_input(self) -> None:
        """Its stdin ends once it has read all."""

    def interrupt(self) -> None:
        """SIGINT to it and to what it started."""

    async def kill(self) -> None:
        """End it with all it started; returns when they are gone. Idempotent."""


class Console(Protocol):
    """One more persistent shell of a sandbox, which can be spoken to while a command runs in it. Its
    background jobs live on between commands."""

    @property
    def running(self) -> bool: ...

    async def begin(self, command: str, *, timeout_s: float, takes_input: bool = False) -> None:
        """Start a command and return; it is killed after ``timeout_s``, and the shell kept. Its stdin is what
        is ``type``d if it ``takes_input``, else empty. Raises ``Conflict`` while another one runs."""

    async def look(self, wait_s: float | None) -> ConsoleState:
        """Wait for the command's end, ``wait_s`` at most (None: as long as it takes), and say how it
        stands. When this is cancelled,
        the command is killed. Raises ``SandboxError`` when the sandbox is gone."""

    def type(self, data: bytes) -> None:
        """For the stdin of a command that takes input."""

    def end_input(self) -> None: ...

    def interrupt(self) -> None:
        """What Ctrl-C does: SIGINT to what runs in the foreground, and to the shell, which gives up the
        rest of the command if the program died of it. A shell other than bash may have its programs
        ignore it."""

    async def close(self) -> None:
        """End the shell and all that was started in it; returns when they are gone. Idempotent."""


class Sandbox(Protocol):
    """A place to act in, with one persistent shell (cwd and environment kept between commands)."""

    @property
    def id(self) -> str: ...

    async def exec(
        self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536
    ) -> ExecResult:
        """Run ``command`` in the persistent shell. At the time-out the command and what it started
        in the foreground are killed and the shell is kept. A second ``exec`` waits for the first.

        Raises ``SandboxError`` when the sandbox is gone.
        """

    async def run(self, command: str, *, timeout_s: float, on_output: Callable[[bytes], None]) -> int | None:
        """Run a program to its end: ``command`` as the shell reads it, stdin empty, what it prints handed
        to ``on_output`` as it comes. The exit code, None when it was killed at the time-out. However this
        ends, nothing runs on in the sandbox but its shell, whose directory and environment are as they
        were, and what was ``spawn``ed. An ``exec`` waits until then.

        Raises ``SandboxError`` when the sandbox is gone."""

    async def spawn(self, command: str, *, on_errors: Callable[[bytes], None]) -> Program:
        """Start a program beside the shell: ``command`` as ``sh`` reads it (``exec`` makes it the program
        itself), in the shell's directory and environment. What it writes to stderr is handed to
        ``on_errors``. It lives until it ends or is killed, or the sandbox is closed; ``run`` leaves it
        alone. Waits for a running ``exec``.

        Raises ``SandboxError`` when the sandbox is gone, or where there is no such way."""

    async def open_console(self) -> Console:
        """Another shell, in the working directory, with the first one's environment. As ``spawn``."""

    async def listen(self) -> socket.socket:
        """A TCP socket that listens on the sandbox's own loopback address, to be accepted from here: the
        way from a sandbox without a network to what is served on it, and to nothing else. Whoever asked
        for it closes it; once the sandbox is closed nobody gets in any more.

        Raises ``SandboxError`` where there is no such way (``listen`` is not in the report's ``can``)."""

    async def connect(self, port: int) -> socket.socket:
        """A connection to what listens on a TCP port of the sandbox's loopback address (127.0.0.1), not
        blocking; whoever asked for it closes it. No network is needed for it.

        Raises ``NotFound`` when nothing answers there, ``SandboxError`` when the sandbox is gone, or where
        there is no such way (``connect`` is not in the report's ``can``)."""

    async def snapshot(self) -> str:
        """Keep the files as they are now, for ``SandboxSpec.snapshot``: of the image, the working directory
        and ``/tmp``; not what runs, nor the shell's directory and variables. A file that is being written is
        kept as it stands. Waits for a running ``exec``; when this is cancelled, the copying ends first. The
        runtime's cache holds it until its place is needed.

        Raises ``SandboxError`` when the sandbox is gone or has written too much, or where there is no such
        way (``snapshot`` is not in the report's ``can``)."""

    async def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        """Raises ``SandboxError`` when it can't be read, ``TooLarge`` when over the limit."""

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file and its missing parent folders."""

    async def close(self) -> None:
        """Stop every process of the sandbox and remove what it left; returns when both are confirmed.
        Idempotent."""


class Runtime(Protocol):
    """Makes sandboxes. ``name`` is what a task's ``runtime`` field says."""

    @property
    def name(self) -> str: ...

    def report(self) -> RuntimeReport:
        """Try what is needed (blocking, under 2 s) and say what works here."""

    def check_image(self, image: str) -> None:
        """Raise ``InvalidInput`` (field ``image``) when no sandbox can start from ``image``."""

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> Sandbox:
        """Start a sandbox that is ready for its first command. ``owner`` is the attempt it belongs
        to; after ``ttl_s`` seconds it is closed whatever happens.

        Raises ``SandboxError``; on cancellation nothing is left behind.
        """

    async def reap(self) -> int:
        """Remove what crashed processes of this runtime left behind; returns how many sandboxes."""

    async def close(self) -> None:
        """Close every sandbox that is still open."""


class Spare(Sandbox, Protocol):
    """A sandbox that was started before anybody asked for it; nothing has run in it."""

    async def adopt(self, spec: SandboxSpec, *, ttl_s: float) -> None:
        """Make it the sandbox of ``spec``, which differs in files and environment from what it was started
        from, and in nothing else; its time to live begins anew. If this fails or is cancelled, it is closed.
        Raises ``SandboxError``."""


@runtime_checkable
class SpareMaker(Runtime, Protocol):
    """A runtime whose sandboxes can be made ahead."""

    async def create_spare(self, spec: SandboxSpec, *, ttl_s: float) -> Spare:
        """As ``create``, from a spec without files and environment."""
