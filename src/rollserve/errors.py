"""The one error tree.

The failure model in three lines:

* a *request* that can't be served raises one of the classes under ``RollserveError`` that carry an
  HTTP status; the API turns it into ``application/problem+json`` with its stable ``code``;
* an *attempt* that does not reach its end raises an ``EpisodeFailure``: its ``kind`` says who was at
  fault, and decides on retries (see ``records.rollout``); a failure is never a reward;
* anything else that escapes is a bug; edges record it as such (``internal``) and go on.

::

    RollserveError
    ├── ConfigError                 settings or user code that can't be used; at start-up
    ├── InvalidInput                400  the field at fault is named
    │   ├── UnknownName             400  … and the nearest known name
    │   └── ContextTooLong          400  prompt longer than the model's context
    ├── Unauthenticated             401
    │   └── UnknownSecret           401  no session of this worker has (or had) it
    ├── Forbidden                   403
    │   └── AnothersSession         403  a session's secret under another session's address
    ├── NotFound                    404
    ├── MethodNotAllowed            405  a known path, another method
    ├── Conflict                    409
    │   ├── InvalidTransition            a move that the table of moves does not have
    │   ├── StaleEpoch                   fenced: a newer attempt or trainer took over
    │   ├── VersionRegression            a policy version that goes back without a rewind
    │   └── LeaseLost                    ack, nack or renew of a delivery not (or no longer) held
    ├── SessionClosed               400  a call after the session's attempt ended
    ├── TooLarge                    413
    ├── QueueFull                   429  with Retry-After
    ├── Unavailable                 503  with Retry-After
    └── EpisodeFailure                   the end of an attempt, by kind
        ├── InfrastructureFailure        sandbox, backend, worker, store: ours; retried
        │   ├── SandboxError
        │   ├── ProgramMissing           the sandbox lacks what the agent runs; not retried
        │   ├── InexactTokens            and the run says ``on_inexact = "fail"``
        │   └── BackendError
        │       ├── BackendUnavailable   nothing answered: another backend may
        │       └── CannotScore     501  it generates, and gives no logprobs of a prompt
        ├── AgentFailure                 the agent's code crashed
        ├── GraderFailure                the grader's code crashed or timed out; retried
        ├── LimitReached                 a budget of the task ran out
        └── AttemptCancelled
"""

from __future__ import annotations

from difflib import get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


SHOWN_NAMES = 50


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """``did you mean 'x'?`` of the known name nearest to ``name``; None where none is near."""
    near = get_close_matches(name, [str(each) for each in known], n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else None


def listed(known: Iterable[str]) -> str:
    """``known: a, b, …``, up to ``SHOWN_NAMES`` of them."""
    names = sorted(known)
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"known: {', '.join(names[:SHOWN_NAMES]) or 'none'}{more}"


class FailureKind(StrEnum):
    """Who was at fault when a rollout has no grade."""

    INFRASTRUCTURE = "infrastructure"
    AGENT = "agent"
    GRADER = "grader"
    LIMIT = "limit"
    CANCELLED = "cancelled"


class RollserveError(Exception):
    """Base of every error rollserve raises on purpose.

    ``field`` is the dotted path of the input at fault, ``hint`` what to do next, ``retry_after_s``
    when trying again makes sense.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        hint: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.hint = hint
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.message}{hint}"


class ConfigError(RollserveError):
    code = "config"


class InvalidInput(RollserveError):
    code = "invalid_input"
    status = 400


class UnknownName(InvalidInput):
    """A name that nothing is registered under; the hint is the nearest known one, or else (with
    ``list_all`` too) which there are."""

    code = "unknown_name"

    def __init__(
        self,
        what: str,
        name: str,
        known: Iterable[str],
        *,
        field: str | None = None,
        list_all: bool = False,
    ) -> None:
        names = list(known)
        near = nearest(name, names)
        hint = " ".join(part for part in (near, listed(names) if list_all or not near else None) if part)
        super().__init__(f"unknown {what} {name!r}", field=field, hint=hint)


class ContextTooLong(InvalidInput):
    """``prompt_tokens`` and ``context_tokens`` are set where both are known: some clients read them."""

    code = "context_too_long"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        hint: str | None = None,
        prompt_tokens: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        super().__init__(message, field=field, hint=hint)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class Unauthenticated(RollserveError):
    code = "unauthenticated"
    status = 401


class UnknownSecret(Unauthenticated):
    code = "unknown_secret"


class Forbidden(RollserveError):
    code = "forbidden"
    status = 403


class AnothersSession(Forbidden):
    code = "anothers_session"


class NotFound(RollserveError):
    code = "not_found"
    status = 404


class MethodNotAllowed(RollserveError):
    code = "method_not_allowed"
    status = 405


class Conflict(RollserveError):
    code = "conflict"
    status = 409


class InvalidTransition(Conflict):
    code = "invalid_transition"


class StaleEpoch(Conflict):
    code = "stale_epoch"


class VersionRegression(Conflict):
    code = "version_regression"


class LeaseLost(Conflict):
    code = "lease_lost"


class SessionClosed(RollserveError):
    code = "session_closed"
    status = 400


class TooLarge(RollserveError):
    code = "too_large"
    status = 413


class QueueFull(RollserveError):
    code = "queue_full"
    status = 429


class Unavailable(RollserveError):
    code = "unavailable"
    status = 503


class EpisodeFailure(RollserveError):
    """Why an attempt has no grade. ``operation`` names what was being done (``sandbox.start``)."""

    code = "episode_failure"
    kind: ClassVar[FailureKind] = FailureKind.INFRASTRUCTURE

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        hint: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint, retry_after_s=retry_after_s)
        self.operation = operation


class InfrastructureFailure(EpisodeFailure):
    code = "infrastructure_failure"


class SandboxError(InfrastructureFailure):
    code = "sandbox_error"


class ProgramMissing(InfrastructureFailure):
    """Nobody's crash and no luck: another try in the same image would miss it again."""

    code = "program_missing"


class InexactTokens(InfrastructureFailure):
    """Calls whose tokens are not exact, in a run that wants no such rollout."""

    code = "inexact"


class BackendError(InfrastructureFailure):
    code = "backend_error"


class BackendUnavailable(BackendError):
    code = "backend_unavailable"


class CannotScore(BackendError):
    code = "cannot_score"
    status = 501


class AgentFailure(EpisodeFailure):
    code = "agent_failure"
    kind = FailureKind.AGENT


class GraderFailure(EpisodeFailure):
    code = "grader_failure"
    kind = FailureKind.GRADER


class LimitReached(EpisodeFailure):
    """``limit`` is the name of the field of ``records.task.Limits`` that ran out."""

    code = "limit_reached"
    kind = FailureKind.LIMIT

    def __init__(self, limit: str, message: str, *, operation: str = "") -> None:
        super().__init__(message, operation=operation)
        self.limit = limit


class AttemptCancelled(EpisodeFailure):
    code = "cancelled"
    kind = FailureKind.CANCELLED


def forget_frames(error: BaseException | None) -> None:
    """Of an error that is kept for what it says, drop where it came from, causes included. A traceback
    holds the frames it went through with all their variables; where one of those keeps the error, all
    of it would stay until the collector comes by."""
    todo, seen = [error], set[int]()
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            todo += [each.__cause__, each.__context__]
