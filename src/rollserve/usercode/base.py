"""The contract of code hosts: what agents, graders and tools see of them.

A host is good for one use: one agent's episode, one grading, or the Python tools of one attempt. When
the use ends, its process and every process it started are killed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import msgspec

from rollserve.errors import RollserveError

T = TypeVar("T")

Handler = Callable[[bytes], Awaitable[object]]
"""Serves one request of a host: the encoded parameters in, a msgspec-encodable value out. A
``RollserveError`` it raises is raised again, as the same class, in the user's code."""

Handlers = Mapping[str, Handler]
Stamp = tuple[int, int, int]
"""Of a file: when it was modified (ns), its size in bytes, its inode."""

LogLine = Callable[[str], None]
Pause = Callable[[], AbstractContextManager[None]]


class Role(StrEnum):
    """What a piece of user code is used as; decides what is checked and how its arguments are read.
    ``ANY``: it only has to exist and be callable."""

    AGENT = "agent"
    GRADER = "grader"
    TOOL = "tool"
    ANY = "any"


class Use(StrEnum):
    """Agents and everything else have separate slots: an agent waits for its tools while it holds its
    own host, so sharing one bound would let agents starve the tools they wait for."""

    AGENT = "agent"
    LEAF = "leaf"


class CodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an import path. ``name`` is the last part of the path; ``parameters`` the JSON
    schema of what is passed by name (a tool's arguments, an agent's or grader's options);
    ``wants_sandbox``: a tool's first parameter is called ``sandbox``. ``version`` is
    ``sha256:<hex of the module's source>``, followed by `` <distribution>==<version>`` where the
    module belongs to an installed one. ``forkable``: importing it started no thread, so that the
    zygote may hold it. ``files``: the sources in the folder of code that were imported by then.
    ``generation``: which of the hosts' states of the code this is of."""

    path: str
    role: Role
    name: str
    module: str
    description: str = ""
    parameters: dict[str, Any] = {}
    wants_sandbox: bool = False
    version: str = ""
    forkable: bool = True
    files: dict[str, Stamp | None] = {}
    generation: int = 0


class Ending(StrEnum):
    """How user code failed."""

    RAISED = "raised"
    EXITED = "exited"
    KILLED = "killed"
    TIMED_OUT = "timed_out"
    PROTOCOL = "protocol"


class CodeFault(RollserveError):
    """User code crashed, left, or ran out of time. Whoever opened the host says what that means: an
    ``AgentFailure``, a ``GraderFailure``, or an error result of a tool. ``trace`` holds the last lines
    of the traceback or of what it printed, bounded."""

    code = "code_fault"

    def __init__(self, message: str, *, ending: Ending, trace: str = "") -> None:
        super().__init__(message)
        self.ending = ending
        self.trace = trace

    @property
    def report(self) -> str:
        return f"{self.message}\n{self.trace}" if self.trace else self.message


class CodeHost(Protocol):
    """One running host."""

    async def call(self, op: str, params: msgspec.Struct, returns: type[T], *, timeout_s: float | None) -> T:
        """Run one operation (``operations``) and decode what it returned. Calls run one at a time.

        Raises ``CodeFault``, or the ``RollserveError`` the user's code raised. At the time-out and on
        cancellation the operation is cancelled, and the process killed when it has not stopped within
        the grace; the host may be unusable afterwards (``alive``)."""

    @property
    def alive(self) -> bool: ...


class CodeHosts(Protocol):
    """Opens hosts, and knows import paths."""

    async def describe(self, path: str, role: Role, *, field: str) -> CodeInfo:
        """Import ``path`` in a host and check that it can be used as ``role``; cached until a file it was
        loaded from changes. Raises ``InvalidInput`` with ``field`` when it can't."""

    def open(
        self,
        use: Use,
        *,
        handlers: Handlers,
        log: LogLine,
        pause: Pause = nullcontext,
        code: Sequence[CodeInfo] = (),
    ) -> AbstractAsyncContextManager[CodeHost]:
        """A host for the length of the ``async with``; its process is gone afterwards. Waits for a
        free slot inside ``pause()``. What it prints goes to ``log``, bounded. It runs ``code`` as it was
        when it was described, though its files changed since. Raises ``InfrastructureFailure`` when no
        process can be started, or that code is held no more."""
