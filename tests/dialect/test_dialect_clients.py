"""Which client a request comes from, and the status that makes it do the right thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollserve.dialect.clients import CLIENTS, NAME_HEADER, OTHER, recognise
from rollserve.dialect.openai import error_document
from rollserve.errors import (
    AnothersSession,
    AttemptCancelled,
    BackendError,
    BackendUnavailable,
    ContextTooLong,
    InfrastructureFailure,
    InvalidInput,
    LimitReached,
    NotFound,
    QueueFull,
    RollserveError,
    SessionClosed,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownSecret,
)

HEADERS: list[tuple[str, dict[str, str]]] = [
    ("claude-code", {"user-agent": "claude-cli/2.1.332 (external, cli)", "x-stainless-lang": "js"}),
    ("claude-code", {"x-claude-code-session-id": "a", "x-stainless-lang": "js"}),
    ("codex", {"user-agent": "codex_exec/0.171.0 (Debian 12; x86_64)"}),
    ("codex", {"x-codex-window-id": "t:0"}),
    ("codex", {"x-codex-turn-metadata": "{}"}),
    ("qwen-code", {"user-agent": "QwenCode/0.24.4 (linux; x64)", "x-stainless-lang": "js"}),
    ("gemini-cli", {"user-agent": "GeminiCLI/0.61.0/m (linux; x64)", "x-goog-api-client": "google"}),
    ("opencode", {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils"}),
    ("opencode", {"x-session-affinity": "ses_1"}),
    ("pi", {NAME_HEADER: "pi", "user-agent": "OpenAI/JS 6.1"}),
    ("mini-swe-agent", {NAME_HEADER: "mini-swe-agent", "user-agent": "AsyncOpenAI/Python 3.57"}),
    ("openhands", {"x-litellm-session-id": "a", "x-stainless-lang": "python"}),
    ("stainless", {"user-agent": "AsyncOpenAI/Python 3.57.0", "x-stainless-lang": "python"}),
    ("google-genai", {"user-agent": "google-genai-sdk/2.34.0", "x-goog-api-client": "google-genai-sdk"}),
    ("other", {"user-agent": "curl/8"}),
    ("other", {NAME_HEADER: "nobody"}),
    ("other", {}),
]

OVER = (SessionClosed("over"), LimitReached("max_turns", "used"), AttemptCancelled("cancelled"))
SECRET = (Unauthenticated("none"), UnknownSecret("wrong"))
BUSY = (Unavailable("full"), BackendUnavailable("nothing answers"), QueueFull("full"))


@pytest.mark.parametrize(("name", "headers"), HEADERS)
def test_a_client_is_known_by_its_headers(name: str, headers: dict[str, str]) -> None:
    assert recognise(headers) is CLIENTS[name]


def test_every_row_is_found() -> None:
    assert {name for name, _ in HEADERS} == set(CLIENTS)


@pytest.mark.parametrize(
    ("name", "over", "secret", "busy"),
    [
        ("claude-code", 400, 400, 529),
        ("codex", 400, 400, 503),
        ("qwen-code", 400, 401, 503),
        ("gemini-cli", 400, 401, 503),
        ("opencode", 400, 401, 503),
        ("pi", 400, 401, 503),
        ("mini-swe-agent", 401, 401, 503),
        ("openhands", 400, 401, 503),
        ("stainless", 400, 401, 503),
        ("google-genai", 400, 401, 503),
        ("other", 400, 401, 503),
    ],
)
def test_each_client_meets_the_status_that_ends_it_or_brings_it_back(
    name: str, over: int, secret: int, busy: int
) -> None:
    client = CLIENTS[name]
    assert {client.status(error) for error in OVER} == {over}
    assert {client.status(error) for error in SECRET} == {secret}
    assert {client.status(error) for error in BUSY} == {busy}


@pytest.mark.parametrize("name", list(CLIENTS))
def test_all_clients_meet_the_same_elsewhere(name: str) -> None:
    wanted: dict[RollserveError, int] = {
        ContextTooLong("too long"): 400,
        InvalidInput("no"): 400,
        AnothersSession("no"): 403,
        NotFound("none"): 404,
        TooLarge("large"): 413,
        BackendError("wrong"): 503 if name == "qwen-code" else 502,
        InfrastructureFailure("disk"): 500,
    }
    assert {error: CLIENTS[name].status(error) for error in wanted} == wanted


def test_qwen_code_asks_anew_after_an_overload_alone() -> None:
    """A stream that broke off for any other cause it goes on with, in words of its own."""
    status = CLIENTS["qwen-code"].status(BackendError("broke off"))
    assert error_document(BackendError("broke off"), status)["type"] == "overloaded_error"
    assert error_document(BackendError("broke off"), 502)["type"] == "server_error"


def test_only_pi_would_rather_lose_a_stream_than_read_an_error_in_it() -> None:
    assert [client.name for client in CLIENTS.values() if client.drops_streams] == ["pi"]


def test_the_grace_covers_the_back_off() -> None:
    """Seconds after which each has come back when it was measured."""
    back = {"claude-code": 37.0, "gemini-cli": 12.0, "mini-swe-agent": 16.0, "openhands": 16.0, "pi": 4.0}
    assert all(CLIENTS[name].grace_s > seconds for name, seconds in back.items())
    assert all(client.grace_s > 0 for client in (*CLIENTS.values(), OTHER))


def test_the_documented_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs/harnesses.md").read_text()
    for client in CLIENTS.values():
        statuses = " | ".join(str(client.status(error)) for error in (OVER[0], SECRET[0], BUSY[0]))
        ending = "breaks off" if client.drops_streams else "an error event"
        ending += "; over generate_content its body alone" if client.bare_errors else ""
        assert f"| `{client.name}` | {statuses} | {client.grace_s:g} | {ending}" in text
