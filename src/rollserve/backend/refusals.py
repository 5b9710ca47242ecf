"""An HTTP answer that is no generation → the typed error that says what it means."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rollserve.backend.http import Answer
from rollserve.errors import BackendError, BackendUnavailable, ContextTooLong, RollserveError

BUSY_RETRY_S = 1.0
"""When a server says 429 without saying for how long."""

_TOO_LONG = re.compile(
    r"context[ _](?:length|size|window)|max(?:imum)?[ _]model[ _]len|longer than the max|ContextTooLong",
    re.IGNORECASE,
)
_SENTENCES = ("message", "detail", "msg", "error_message")
_TITLE = re.compile(rb"<title[^>]*>(.{1,200}?)</title>", re.IGNORECASE | re.DOTALL)


def refusal(answer: Answer, *, operation: str) -> RollserveError:
    """429 and 503 are ``BackendUnavailable`` (with ``retry_after_s`` where the server is alive but
    busy), a prompt that does not fit is ``ContextTooLong``, all else ``BackendError``."""
    status, text = answer.status, message_of(answer)
    if status == 429:
        return BackendUnavailable(
            f"the backend is busy: {text}",
            operation=operation,
            retry_after_s=answer.retry_after_s or BUSY_RETRY_S,
        )
    if status == 503:
        return BackendUnavailable(
            f"the backend is not serving: {text}", operation=operation, retry_after_s=answer.retry_after_s
        )
    if status in (502, 504):
        return BackendUnavailable(f"a proxy found no backend: {text}", operation=operation)
    if status in (400, 413, 422) and _TOO_LONG.search(text):
        return ContextTooLong(text, field="token_ids")
    hint = "check the backend's api_key" if status in (401, 403) else None
    return BackendError(f"the backend answered HTTP {status}: {text}", operation=operation, hint=hint)


def message_of(answer: Answer) -> str:
    """The sentence in an error body, whoever wrote it (OpenAI, vLLM, SGLang, FastAPI, a proxy)."""
    try:
        body: Any = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return describe(answer)
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict):
            text = next((inner[key] for key in _SENTENCES if inner.get(key)), None)
            kind = inner.get("type")
            if isinstance(text, str):
                return (
                    f"{text} [{kind}]"[:1000] if isinstance(kind, str) and kind not in text else text[:1000]
                )
        elif isinstance(inner, str):
            return inner[:1000]
    return describe(answer)


def describe(answer: Answer) -> str:
    """What answered, in words: ``an HTML page "Welcome to nginx!" (HTTP 200)``."""
    body = answer.body.strip()
    if not body:
        return f"an empty body (HTTP {answer.status})"
    if answer.content_type == "text/html" or body[:15].lower().startswith((b"<!doctype html", b"<html")):
        found = _TITLE.search(body)
        title = f" {found[1].decode(errors='replace').strip()!r}" if found else ""
        return f"an HTML page{title} (HTTP {answer.status})"
    start = body[:120].decode(errors="replace")
    return f"{answer.content_type or 'a body'} {start!r} (HTTP {answer.status})"
