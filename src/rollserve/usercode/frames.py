"""What goes over the wires of a code host.

Two channels: *control* (worker ↔ zygote, a sequenced-packet socket, one message a packet, file
descriptors beside ``Fork``) and *host* (worker ↔ host, a stream of frames: four bytes of length, big
endian, then msgpack). On the host channel both ends may call the other; ids are the caller's.

Errors cross as a code of the one error tree and are rebuilt from a fixed table: a peer can't name a
class to be made.
"""

from __future__ import annotations

import struct

import msgspec

from rollserve import errors
from rollserve.errors import EpisodeFailure, LimitReached, RollserveError
from rollserve.usercode.base import Role

MAX_FRAME_BYTES = 64 << 20
MAX_PACKET_BYTES = 64 << 10
LENGTH = struct.Struct(">I")


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    id: int
    op: str
    params: bytes


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    id: int


class Result(msgspec.Struct, frozen=True, tag="result", array_like=True):
    id: int
    value: bytes


class Fault(msgspec.Struct, frozen=True, tag="fault", array_like=True):
    """``code`` is one of the error tree's, or ``raised``/``exited`` for what user code did.
    ``operation`` and ``limit`` are those of an ``EpisodeFailure``."""

    id: int
    code: str
    message: str
    trace: str = ""
    field: str | None = None
    operation: str = ""
    limit: str = ""


class Note(msgspec.Struct, frozen=True, tag="note", array_like=True):
    """A line for the attempt's log."""

    line: str


Frame = Call | Cancel | Result | Fault | Note


class Fork(msgspec.Struct, frozen=True, tag="fork", array_like=True):
    """Comes with two descriptors: the host's channel and the write end of its output pipe."""

    id: int
    memory_mb: int | None
    cpu_s: int | None


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """The worker will not signal this host any more: its process id may be given back."""

    id: int


class Preload(msgspec.Struct, frozen=True, tag="preload", array_like=True):
    path: str
    role: Role


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    pass


class Forked(msgspec.Struct, frozen=True, tag="forked", array_like=True):
    id: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag="fork_failed", array_like=True):
    id: int
    message: str


class Exited(msgspec.Struct, frozen=True, tag="exited", array_like=True):
    """``status`` is the exit code, or minus the signal that ended it."""

    id: int
    status: int


class Preloaded(msgspec.Struct, frozen=True, tag="preloaded", array_like=True):
    """``error`` says why it could not be, or is empty: then hosts do it themselves."""

    error: str


ToZygote = Fork | Release | Preload
FromZygote = Ready | Forked | ForkFailed | Exited | Preloaded


def pack(frame: Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return LENGTH.pack(len(body)) + body


_REBUILT: dict[str, type[RollserveError]] = {
    kind.code: kind
    for kind in (
        errors.InvalidInput,
        errors.ContextTooLong,
        errors.SessionClosed,
        errors.NotFound,
        errors.Conflict,
        errors.TooLarge,
        errors.QueueFull,
        errors.Unavailable,
        errors.InfrastructureFailure,
        errors.SandboxError,
        errors.BackendError,
        errors.BackendUnavailable,
        errors.AgentFailure,
        errors.GraderFailure,
        errors.AttemptCancelled,
    )
}


def _known_code(error: RollserveError) -> str:
    """The code of the nearest class of ``error`` that the other side can rebuild."""
    if isinstance(error, LimitReached):
        return error.code
    codes = (kind.code for kind in type(error).__mro__ if issubclass(kind, RollserveError))
    return next((code for code in codes if code in _REBUILT), errors.InvalidInput.code)


def to_fault(call_id: int, error: RollserveError) -> Fault:
    return Fault(
        id=call_id,
        code=_known_code(error),
        message=error.message if error.hint is None else f"{error.message} ({error.hint})",
        field=error.field,
        operation=error.operation if isinstance(error, EpisodeFailure) else "",
        limit=error.limit if isinstance(error, LimitReached) else "",
    )


def to_error(fault: Fault) -> RollserveError | None:
    """The error of the tree that ``fault`` stands for; None when it stands for a crash."""
    if fault.code == LimitReached.code:
        return LimitReached(fault.limit, fault.message, operation=fault.operation)
    kind = _REBUILT.get(fault.code)
    if kind is None:
        return None
    if issubclass(kind, EpisodeFailure):
        return kind(fault.message, operation=fault.operation)
    return kind(fault.message, field=fault.field)
