"""One table of errors, in each provider's words."""

from __future__ import annotations

import json

import pytest

from rollserve.dialect.chat import ChatDialect
from rollserve.dialect.generate_content import GenerateContentDialect
from rollserve.dialect.messages import MessagesDialect
from rollserve.dialect.responses import ResponsesDialect
from rollserve.errors import (
    BackendUnavailable,
    Forbidden,
    InvalidInput,
    MethodNotAllowed,
    NotFound,
    QueueFull,
    RollserveError,
    SessionClosed,
    TooLarge,
    Unauthenticated,
)

BAD = ("invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    ("error", "status", "openai", "anthropic", "google"),
    [
        (InvalidInput("no", field="tools"), 400, *BAD),
        (SessionClosed("no"), 400, *BAD),
        (Unauthenticated("no"), 401, "authentication_error", "authentication_error", "UNAUTHENTICATED"),
        (Forbidden("no"), 403, "permission_error", "permission_error", "PERMISSION_DENIED"),
        (NotFound("no"), 404, "not_found_error", "not_found_error", "NOT_FOUND"),
        (MethodNotAllowed("no"), 405, *BAD),
        (TooLarge("no"), 413, "invalid_request_error", "request_too_large", "INVALID_ARGUMENT"),
        (QueueFull("no"), 429, "rate_limit_error", "rate_limit_error", "RESOURCE_EXHAUSTED"),
        (RollserveError("no"), 500, "server_error", "api_error", "INTERNAL"),
        (RollserveError("no"), 502, "server_error", "api_error", "INTERNAL"),
        (BackendUnavailable("no"), 503, "overloaded_error", "overloaded_error", "UNAVAILABLE"),
        (BackendUnavailable("no"), 529, "server_error", "overloaded_error", "INTERNAL"),
    ],
)
def test_the_names_of_errors(
    error: RollserveError, status: int, openai: str, anthropic: str, google: str
) -> None:
    for dialect in (ChatDialect(), ResponsesDialect()):
        assert json.loads(dialect.error(error, status)) == {
            "error": {"message": "no", "type": openai, "param": error.field, "code": error.code}
        }
    assert json.loads(MessagesDialect().error(error, status)) == {
        "type": "error",
        "error": {"type": anthropic, "message": str(error)},
    }
    assert json.loads(GenerateContentDialect().error(error, status)) == {
        "error": {"code": status, "message": str(error), "status": google}
    }
