"""The clients that agents use, by what their requests say of them, and what makes each do the right
thing. Pure.

What is right: stop at once where no later try can succeed (the session is over, a budget is used up), come
back where one can (nothing answers just now), compact where the context is full. Clients differ in the
status that does it. ``grace_s`` covers a client's back-off: a request whose connection was lost comes back
within it. ``docs/harnesses.md`` shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollserve.errors import (
    BackendError,
    BackendUnavailable,
    ContextTooLong,
    EpisodeFailure,
    QueueFull,
    RollserveError,
    SessionClosed,
    Unauthenticated,
    Unavailable,
)

NAME_HEADER = "x-rollserve-client"
"""Where a client's own headers don't tell which it is, its configuration may add this one."""


class Trouble(StrEnum):
    """What a client must be told."""

    OVER = "over"
    """The session has ended, or a budget of the attempt is used up: no later call can succeed."""
    CONTEXT = "context"
    SECRET = "secret"
    BUSY = "busy"
    """Nothing can answer now; later something may."""
    BACKEND = "backend"
    OTHER = "other"
    """The error's own status."""


_STATUS = {
    Trouble.OVER: 400,
    Trouble.CONTEXT: 400,
    Trouble.SECRET: 401,
    Trouble.BUSY: 503,
    Trouble.BACKEND: 502,
}


@dataclass(frozen=True, kw_only=True)
class Client:
    """``statuses`` are where it differs from the rest. ``drops_streams``: an error inside a stream ends it, a
    lost connection doesn't, so a stream that failed and may be tried again breaks off. ``bare_errors`` are
    the dialects in whose streams it reads an error only where that is no event, but its body alone."""

    name: str
    grace_s: float = 10.0
    statuses: Mapping[Trouble, int] = field(default_factory=dict)
    drops_streams: bool = False
    bare_errors: frozenset[str] = frozenset()

    def status(self, error: RollserveError) -> int:
        trouble = trouble_of(error)
        if trouble is Trouble.OTHER:
            return 400 if error.status == 429 else error.status
        return self.statuses.get(trouble, _STATUS[trouble])


OTHER = Client(name="other")
_GOOGLES = frozenset({"generate_content"})

CLIENTS = {
    client.name: client
    for client in (
        Client(name="claude-code", grace_s=45.0, statuses={Trouble.SECRET: 400, Trouble.BUSY: 529}),
        Client(name="codex", statuses={Trouble.SECRET: 400}),
        Client(name="qwen-code", statuses={Trouble.BACKEND: 503}),
        Client(name="gemini-cli", grace_s=20.0, bare_errors=_GOOGLES),
        Client(name="opencode"),
        Client(name="pi", drops_streams=True),
        Client(name="mini-swe-agent", grace_s=20.0, statuses={Trouble.OVER: 401}),
        Client(name="openhands", grace_s=20.0),
        Client(name="stainless"),
        Client(name="google-genai", grace_s=2.0, bare_errors=_GOOGLES),
        OTHER,
    )
}
"""By name; 429 stands nowhere: it ends Codex, and makes others wait for longer than they need. Qwen Code asks
for an answer anew that broke off in its middle only where the cause is an overload; after another it goes on
from the part it has, with words of its own, or gives up."""

_AGENTS = (
    ("claude-cli/", "claude-code"),
    ("codex", "codex"),
    ("qwencode", "qwen-code"),
    ("geminicli", "gemini-cli"),
    ("opencode/", "opencode"),
    ("kilo", "opencode"),
    ("pi/", "pi"),
    ("mini-swe-agent", "mini-swe-agent"),
)
_HEADERS = (
    ("x-claude-code-session-id", "claude-code"),
    ("x-codex-window-id", "codex"),
    ("x-codex-turn-metadata", "codex"),
    ("x-session-affinity", "opencode"),
    ("x-litellm-session-id", "openhands"),
    ("x-stainless-lang", "stainless"),
    ("x-goog-api-client", "google-genai"),
)


def recognise(headers: Mapping[str, str]) -> Client:
    """``headers`` have lower-case names. What nothing is known of is ``OTHER``."""
    if named := CLIENTS.get(headers.get(NAME_HEADER, "").lower()):
        return named
    agent = headers.get("user-agent", "").lower()
    for beginning, name in _AGENTS:
        if agent.startswith(beginning):
            return CLIENTS[name]
    return next((CLIENTS[name] for header, name in _HEADERS if header in headers), OTHER)


def trouble_of(error: RollserveError) -> Trouble:
    if isinstance(error, ContextTooLong):
        return Trouble.CONTEXT
    if isinstance(error, Unauthenticated):
        return Trouble.SECRET
    if isinstance(error, (Unavailable, QueueFull, BackendUnavailable)):
        return Trouble.BUSY
    if isinstance(error, BackendError):
        return Trouble.BACKEND
    spent = isinstance(error, EpisodeFailure) and error.kind in ("limit", "cancelled")
    return Trouble.OVER if spent or isinstance(error, SessionClosed) else Trouble.OTHER
