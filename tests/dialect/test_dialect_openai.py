from __future__ import annotations

import json
from typing import Any

import pytest

from rollserve.dialect import openai
from rollserve.errors import ContextTooLong, InvalidInput, SessionClosed

TURN = {"request_kind": "turn", "thread": "t"}


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, {}),
        ({"session-id": "s"}, {}, {"session": "s"}),
        ({"x-session-id": "s"}, {}, {"session": "s"}),
        ({"x-litellm-session-id": "s"}, {}, {"session": "s"}),
        ({}, {"session_id": "s"}, {"session": "s"}),
        ({}, {"session_id": 7}, {}),
        ({}, {"session_id": "s" * 257}, {}),
        ({"x-stainless-retry-count": "0"}, {}, {}),
        ({"x-stainless-retry-count": "2"}, {}, {"retry": "2"}),
        ({"x-stainless-retry-count": "two"}, {}, {}),
        ({"x-stainless-retry-count": "9" * 5000}, {}, {}),
        (
            {"x-session-id": "child", "x-parent-session-id": "top"},
            {},
            {"session": "child", "subagent": "child"},
        ),
        ({"x-parent-session-id": "top"}, {}, {"subagent": "top"}),
        ({"session-id": "s", "thread-id": "s"}, {}, {"session": "s"}),
        (
            {"session-id": "s", "thread-id": "t2", "x-openai-subagent": "collab_spawn"},
            {},
            {"session": "s", "subagent": "t2"},
        ),
        ({"x-openai-subagent": "review"}, {}, {"subagent": "review"}),
        ({"thread-id": "t2", "x-codex-parent-thread-id": "t1"}, {}, {"subagent": "t2"}),
        ({"x-codex-turn-metadata": json.dumps(TURN)}, {}, {}),
        (
            {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})},
            {},
            {"purpose": "compaction"},
        ),
        ({"x-codex-turn-metadata": "{"}, {}, {}),
        ({"x-codex-turn-metadata": "[" * 9000}, {}, {}),
        ({"x-codex-turn-metadata": '{"request_kind": 3}'}, {}, {}),
        (
            {},
            {"client_metadata": {"x-codex-turn-metadata": '{"request_kind":"prewarm"}', "session-id": "s"}},
            {"purpose": "prewarm", "session": "s"},
        ),
        ({"session-id": "s"}, {"client_metadata": {"session-id": "other"}}, {"session": "s"}),
        ({}, {"client_metadata": ["x"]}, {}),
        ({}, {"client_metadata": {"x-stainless-retry-count": 3, "x-openai-subagent": [1]}}, {}),
    ],
)
def test_what_clients_say_of_themselves(
    headers: dict[str, str], body: dict[str, Any], expected: dict[str, str]
) -> None:
    assert openai.hints(headers, body) == expected


def test_a_context_that_is_too_long_is_said_in_words_that_clients_know() -> None:
    error = ContextTooLong("maximum context length is 10 tokens, the prompt has 12", field="messages")
    document = openai.error_document(error, 400)
    assert document["code"] == "context_length_exceeded"
    assert document["type"] == "invalid_request_error"
    for words in ("exceeds the context window", "This model's maximum context length is", "is 10 tokens"):
        assert words in document["message"]


def test_a_schema_that_no_record_holds_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"properties": deep}
    for schema in (deep, {"maximum": 2**64}):
        with pytest.raises(InvalidInput) as caught:
            openai.schema_of({"type": "json_schema"}, {"schema": schema}, "format")
        assert caught.value.field == "format.schema"


def test_a_hint_is_part_of_the_message() -> None:
    assert openai.error_message(SessionClosed("over", hint="start again")) == "over (start again)"
