from __future__ import annotations

import json
from typing import Any

import pytest

from rollserve.dialect.base import Answered, Asked, Piece, Target
from rollserve.dialect.marks import mark
from rollserve.dialect.responses import ResponsesDialect
from rollserve.errors import (
    BackendUnavailable,
    ContextTooLong,
    LimitReached,
    QueueFull,
    RollserveError,
    SessionClosed,
)
from rollserve.records.call import Message, ToolCall

CALL = ToolCall(id="c1", name="f", arguments='{"a":1}')
PATCH = ToolCall(id="c2", name="patch", arguments='{"input":"x"}')


def parse(**body: Any) -> Asked:
    tools = [{"type": "custom", "name": "patch"}]
    raw = json.dumps({"model": "m", "input": "hi", "stream": True, "tools": tools, **body}).encode()
    return ResponsesDialect().parse(Target(operation="generate"), raw, {}, {})


def answered(message: Message, finish: str = "stop") -> Answered:
    return Answered(
        call_id="mc_1",
        message=message,
        finish_reason=finish,
        prompt_tokens=5,
        sampled_tokens=3,
        cached_tokens=2,
    )


def events(stream: bytes) -> list[Any]:
    lines = [line for line in stream.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed(asked: Asked, answer: Answered, rest: list[Piece]) -> list[Any]:
    writer = ResponsesDialect().writer(asked, stream_id="mc_1", created_s=9)
    return events(writer.opening() + writer.closing([answer], [rest]))


def test_all_events_in_order() -> None:
    writer = ResponsesDialect().writer(parse(), stream_id="mc_1", created_s=9)
    message = Message(role="assistant", reasoning="hm", content="abc", tool_calls=(CALL, PATCH))
    stream = writer.opening() + writer.piece(Piece("reasoning", "hm"))
    stream += writer.piece(Piece("content", "ab")) + writer.keep_alive()
    stream += writer.closing([answered(message, "tool_calls")], [[Piece("content", "c")]])
    found = events(stream)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "in_progress",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert [event["output_index"] for event in found if event["type"].endswith("item.added")] == [0, 1, 2, 3]
    response = found[-1]["response"]
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }
    assert response["output"][0]["encrypted_content"] == mark("mc_1")


def test_a_stream_ends_with_the_response_that_the_whole_answer_is() -> None:
    asked = parse(metadata={"a": "b"}, parallel_tool_calls=False, previous_response_id="resp_mc_0")
    message = Message(role="assistant", reasoning="hm", content="abc", tool_calls=(CALL, PATCH))
    for finish in ("tool_calls", "length"):
        answer = answered(message, finish)
        last = streamed(asked, answer, [Piece("reasoning", "hm"), Piece("content", "abc")])[-1]
        whole = json.loads(ResponsesDialect().whole(asked, [answer], created_s=9))
        assert last["response"] == whole
    assert whole["id"] == "resp_mc_1"
    assert (whole["metadata"], whole["parallel_tool_calls"]) == ({"a": "b"}, False)
    assert whole["previous_response_id"] == "resp_mc_0"


@pytest.mark.parametrize("finish", ["length", "abort"])
@pytest.mark.parametrize("calls", [(), (CALL, PATCH, CALL)])
def test_a_cut_answer_is_incomplete_and_so_is_its_last_item(finish: str, calls: tuple[ToolCall, ...]) -> None:
    message = Message(role="assistant", content="ab", tool_calls=calls)
    last = streamed(parse(), answered(message, finish), [Piece("content", "ab")])[-1]
    assert last["type"] == "response.incomplete"
    response = last["response"]
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    states = [item["status"] for item in response["output"]]
    assert states == ["completed"] * len(calls) + ["incomplete"]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    last = streamed(parse(), answered(Message(role="assistant")), [])[-1]
    (item,) = last["response"]["output"]
    assert [part["text"] for part in item["content"]] == [""]


def test_a_request_without_logprobs_gets_none() -> None:
    message = Message(role="assistant", content="a")
    last = streamed(parse(), answered(message), [Piece("content", "a")])[-1]
    assert last["response"]["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BackendUnavailable("nobody there"), 503, "server_error"),
        (RollserveError("oh"), 500, "server_error"),
        (SessionClosed("over"), 400, "invalid_prompt"),
        (LimitReached("max_turns", "used"), 400, "invalid_prompt"),
        (ContextTooLong("too long"), 400, "context_length_exceeded"),
        (QueueFull("later"), 429, "rate_limit_exceeded"),
    ],
)
def test_a_failure_says_by_its_code_whether_to_try_again(
    error: RollserveError, status: int, code: str
) -> None:
    writer = ResponsesDialect().writer(parse(), stream_id="mc_1", created_s=9)
    stream = writer.opening() + writer.piece(Piece("reasoning", "hm")) + writer.piece(Piece("content", "a"))
    last = events(stream + writer.failure(error, status))[-1]
    assert last["type"] == "response.failed"
    response = last["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    assert error.message in response["error"]["message"]
    assert [item["type"] for item in response["output"]] == ["reasoning"]


def test_counted() -> None:
    document = json.loads(ResponsesDialect().counted(parse(), 12))
    assert document == {"object": "response.input_tokens", "input_tokens": 12}
