"""The contract of a sandbox runtime: a *runtime* makes sandboxes, a *sandbox* is acted in.

Every implementation passes ``rollserve.testing.runtime_conformance``. Paths inside a sandbox are
absolute, or relative to its working directory (``/workspace``). Every call has a deadline; cancelling
an awaited call stops what it started in the sandbox before the cancellation is passed on.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

WORKDIR = "/workspace"


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Per-sandbox bounds. A runtime says in its ``RuntimeReport`` which it can enforce."""

    memory_mb: int = 2048
    processes: int = 256
    file_mb: int = 512
    cpu_s: int | None = None


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start: an image, files laid down before anything runs, environment, bounds.

    ``sockets`` maps a path inside (below ``/tmp`` works for every image) to the path of a Unix socket
    of the host that is bound there: the one way out of a sandbox without a network.
    """

    image: str = "host"
    files: dict[str, bytes] = {}
    env: dict[str, str] = {}
    limits: SandboxLimits = SandboxLimits()
    sockets: dict[str, str] = {}


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


class RuntimeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime can do on this machine. ``enforces`` names fields of ``SandboxLimits``."""

    name: str
    usable: bool
    isolated: bool
    detail: str = ""
    remedy: str = ""
    enforces: tuple[str, ...] = ()


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
