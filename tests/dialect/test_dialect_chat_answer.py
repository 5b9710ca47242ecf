from __future__ import annotations

import json
from typing import Any

from rollserve.dialect.base import Answered, Asked, Piece, TokenLogprob
from rollserve.dialect.chat import ChatDialect
from rollserve.dialect.chat_request import ChatForm
from rollserve.errors import BackendUnavailable
from rollserve.records.call import ChatRequest, Message, ToolCall

CALLS = (
    ToolCall(id="c1", name="f", arguments="{bad", error="broken"),
    ToolCall(id="c2", name="g", arguments="{}"),
)


def asked(*, n: int = 1, usage: bool = False) -> Asked:
    return Asked(request=ChatRequest(messages=()), model="m", n=n, form=ChatForm(usage))


def answered(message: Message, finish: str = "stop", **fields: Any) -> Answered:
    counts = {"prompt_tokens": 3, "sampled_tokens": 2, "cached_tokens": 1, **fields}
    return Answered(call_id="mc_1", message=message, finish_reason=finish, **counts)


def whole(*answers: Answered) -> Any:
    return json.loads(ChatDialect().whole(asked(), answers, created_s=9))


def events(stream: bytes) -> list[Any]:
    blocks = stream.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block != "data: [DONE]"]


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def test_an_answer_of_calls() -> None:
    tokens = [TokenLogprob("é", -0.5)]
    message = Message(role="assistant", reasoning="hm", tool_calls=CALLS)
    document = whole(answered(message, "tool_calls", tokens=tokens))
    (choice,) = document["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{bad"}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert choice["logprobs"]["content"] == [
        {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9], "top_logprobs": []}
    ]
    assert (document["id"], document["created"], document["model"]) == ("chatcmpl-mc_1", 9, "m")


def test_several_choices_have_one_prompt() -> None:
    document = whole(answered(said("a")), answered(said(""), "abort", sampled_tokens=5))
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in document["choices"]] == ["a", ""]
    assert [choice["finish_reason"] for choice in document["choices"]] == ["stop", "length"]
    assert document["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_stream_of_several_choices() -> None:
    writer = ChatDialect().writer(asked(n=2, usage=True), stream_id="mc_1", created_s=9)
    stream = writer.opening() + writer.piece(Piece("content", "b"), choice=1)
    stream += writer.piece(Piece("reasoning", "hm"), choice=0) + writer.keep_alive()
    answers = [answered(said("a")), answered(Message(role="assistant", content="b", tool_calls=CALLS[1:]))]
    stream += writer.closing(answers, [[Piece("content", "a")], []])
    *chunks, last = events(stream)
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "b"}),
        (0, {"reasoning_content": "hm"}),
        (0, {"content": ""}),
        (0, {"content": "a"}),
        (0, {}),
        (1, {"tool_calls": [{"index": 0, "id": "c2", "type": "function", "function": _function(CALLS[1])}]}),
        (1, {}),
    ]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    assert stream.endswith(b"data: [DONE]\n\n")


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def test_usage_is_streamed_on_request_alone() -> None:
    writer = ChatDialect().writer(asked(), stream_id="mc_1", created_s=9)
    stream = writer.opening() + writer.closing([answered(said("a"))], [[Piece("content", "a")]])
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in events(stream))


def test_a_failure_ends_the_stream_with_an_error() -> None:
    writer = ChatDialect().writer(asked(), stream_id="mc_1", created_s=9)
    failure = writer.failure(BackendUnavailable("nobody there"), 503)
    assert events(failure) == [
        {
            "error": {
                "message": "nobody there",
                "type": "overloaded_error",
                "param": None,
                "code": "backend_unavailable",
            }
        }
    ]


def test_models() -> None:
    entry = {"id": "p", "object": "model", "created": 9, "owned_by": "rollserve"}
    dialect = ChatDialect()
    assert json.loads(dialect.models(["p"], created_s=9)) == {"object": "list", "data": [entry]}
    assert json.loads(dialect.model("p", created_s=9)) == entry
