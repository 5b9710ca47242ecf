from __future__ import annotations

import json
from typing import Any

import pytest

from rollserve.dialect.base import Asked, Target
from rollserve.dialect.marks import mark
from rollserve.dialect.responses import ResponsesDialect
from rollserve.dialect.responses_ids import item_id
from rollserve.errors import InvalidInput, MethodNotAllowed
from rollserve.records.call import Message, ToolCall

GENERATE = Target(operation="generate")


def parse(headers: dict[str, str] | None = None, **body: Any) -> Asked:
    raw = json.dumps({"model": "m", **body}).encode()
    return ResponsesDialect().parse(GENERATE, raw, headers or {}, {})


def read(*items: Any) -> tuple[Message, ...]:
    return parse(input=list(items)).request.messages


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def said(text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "status": "completed", "content": [part], **more}


def thought(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **more}


def call(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}", **more}


def result(number: int, output: Any = "out") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": output}


def made(number: int) -> ToolCall:
    return ToolCall(id=f"c{number}", name="f", arguments="{}")


def answered(number: int) -> Message:
    return Message(role="tool", content="out", tool_call_id=f"c{number}")


def test_paths() -> None:
    target = ResponsesDialect().target
    assert target("POST", "/v1/responses") == GENERATE
    assert target("POST", "/v1/responses/input_tokens") == Target(operation="count")
    for path in ("/v1/responses/resp_1", "/v1/responses/compact", "/v1/chat/completions"):
        assert target("POST", path) is None
    with pytest.raises(MethodNotAllowed):
        target("GET", "/v1/responses")


def test_input_as_text_and_instructions() -> None:
    assert parse(input="hi", instructions="be kind").request.messages == (
        Message(role="system", content="be kind"),
        Message(role="user", content="hi"),
    )
    assert parse(input="hi", instructions="").request.messages == (Message(role="user", content="hi"),)


def test_a_model_turn_is_one_message() -> None:
    items = (
        {"role": "developer", "content": "d"},
        user("go"),
        thought("hm"),
        said("I will"),
        call(1),
        call(2, namespace=None, caller=None, async_=None),
        result(2),
        result(1, [{"type": "input_text", "text": "o"}, {"type": "input_text", "text": "ut"}]),
        said("done"),
        user("more"),
    )
    assert read(*items) == (
        Message(role="system", content="d"),
        Message(role="user", content="go"),
        Message(role="assistant", reasoning="hm", content="I will", tool_calls=(made(1), made(2))),
        answered(2),
        answered(1),
        Message(role="assistant", content="done"),
        Message(role="user", content="more"),
    )


def test_turns_that_follow_each_other_stay_two() -> None:
    assert read(said("a"), said("b")) == (
        Message(role="assistant", content="a"),
        Message(role="assistant", content="b"),
    )
    assert [m.reasoning for m in read(thought("a"), call(1), thought("b"), call(2))] == ["a", "b"]
    assert [m.tool_calls for m in read(call(1), result(1), call(2))] == [(made(1),), (), (made(2),)]


def test_items_of_the_same_call_are_one_turn_in_any_order() -> None:
    def own(kind: str, index: int) -> dict[str, str]:
        return {"id": item_id(kind, "mc_1", index)}

    items = [said("a", **own("msg", 0)), thought("t", **own("rs", 1)), said("b", **own("msg", 2))]
    assert read(*items) == (Message(role="assistant", content="ab", reasoning="t", call_id="mc_1"),)
    paired = [call(1, **own("fc", 0)), result(1), call(2, **own("fc", 1)), result(2)]
    assert read(*paired) == (
        Message(role="assistant", tool_calls=(made(1), made(2)), call_id="mc_1"),
        answered(1),
        answered(2),
    )
    another = {"id": item_id("msg", "mc_2", 0)}
    assert [m.call_id for m in read(call(1, **own("fc", 0)), said("b", **another))] == ["mc_1", "mc_2"]


def test_the_mark_in_the_reasoning_says_whose_turn_it_is() -> None:
    (turn,) = read(thought("hm", encrypted_content=mark("mc_1"), id="rs_foreign"), said("a"), call(1))
    assert turn.call_id == "mc_1"
    (bare,) = read({"type": "reasoning", "summary": [], "encrypted_content": mark("mc_1")})
    assert bare == Message(role="assistant", call_id="mc_1")


def test_foreign_ids_and_marks_say_nothing() -> None:
    foreign = thought("hm", encrypted_content="gAAAAABo", id="rs_67c9")
    (turn,) = read(foreign, said("a", id="msg_67c9"), call(1, id="fc_67c9"))
    assert turn.call_id is None
    assert turn.reasoning == "hm"


def test_a_thought_of_which_nothing_can_be_read_is_left_out() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"}
    assert read(sealed, user("go")) == (Message(role="user", content="go"),)


def test_reasoning_content_goes_before_its_summary() -> None:
    full = thought(
        "short", content=[{"type": "reasoning_text", "text": "all"}, {"type": "text", "text": "!"}]
    )
    several = thought("one")
    several["summary"].append({"type": "summary_text", "text": "two"})
    assert [m.reasoning for m in read(full, said("a"), several, said("b"))] == ["all!", "one\n\ntwo"]


def test_custom_calls_and_their_results() -> None:
    items = (
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"\n'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "{x", "id": "ctr_rv_mc_1_1"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    )
    turn, done = read(*items)
    assert turn.tool_calls == (
        ToolCall(id="c1", name="patch", arguments='{"input":"a \\"b\\"\\n"}'),
        ToolCall(id="c2", name="patch", arguments="{x"),
    )
    assert done == Message(role="tool", content="ok", tool_call_id="c1")


def test_a_call_in_a_namespace_is_of_the_name_it_was_offered_under() -> None:
    (turn,) = read(call(1, namespace="agents"))
    assert turn.tool_calls[0].name == "agents__f"


def test_what_is_asked_for_is_kept() -> None:
    asked = parse(
        input="hi",
        store=False,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        parallel_tool_calls=True,
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        reasoning={"effort": "high"},
        max_output_tokens=7,
        text={"verbosity": "low", "format": {"type": "text"}},
        wobble=1,
        top_logprobs=0,
        stream=True,
        previous_response_id="resp_mc_9",
    )
    assert asked.request.asked == {
        "store": False,
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "reasoning": {"effort": "high"},
        "max_tokens": 7,
        "text": {"verbosity": "low"},
        "wobble": 1,
        "top_logprobs": 0,
    }
    assert (asked.stream, asked.logprobs, asked.continues, asked.model) == (True, True, "mc_9", "m")


def test_formats() -> None:
    schema = {"type": "object"}
    json_schema = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    assert parse(input="hi", text={"format": json_schema}).request.schema == schema
    assert parse(input="hi", text={"format": {"type": "json_object"}}).request.schema == {}
    assert parse(input="hi", text={"format": None}).request.schema is None


def test_codex_says_who_asks() -> None:
    headers = {
        "session-id": "s",
        "thread-id": "t2",
        "x-openai-subagent": "collab_spawn",
        "x-codex-turn-metadata": '{"request_kind":"compaction"}',
        "x-stainless-retry-count": "1",
    }
    expected = {"session": "s", "subagent": "t2", "purpose": "compaction", "retry": "1"}
    assert parse(headers, input="hi").request.hints == expected


def test_an_answer_is_gone_on_from_without_new_items() -> None:
    assert parse(previous_response_id="resp_mc_1").request.messages == ()


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input.0"),
        ({"input": [{"content": "x"}]}, "input.0.type"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "message", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0.image_url"),
        ({"input": [{"role": "system", "content": [IMAGE]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{**IMAGE, "file_id": "f"}]}]}, "input.0.content.0.file_id"),
        ({"input": [user("a"), result(1, [IMAGE])]}, "input.1.output.0.image_url"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0.name"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": 1}]}, "input.0.call_id"),
        ({"input": [{"type": "local_shell_call", "action": {}}]}, "input.0.type"),
        ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input.0.type"),
        ({"input": [{"type": "compaction_trigger"}]}, "input.0.type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"input": [{"type": ["message"], "role": "user"}]}, "input.0.type"),
        ({"input": "x", "instructions": ["y"]}, "instructions"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "x", "text": {"format": "json"}}, "text.format"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "wobble": 2**64}, "wobble"),
        ({"input": "x", "metadata": []}, "metadata"),
    ],
)
def test_bad_requests_name_the_parameter(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(**body)
    assert caught.value.field == field
