"""What clients put into a generateContent request, and what is refused of it."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.dialect.base import Asked, Target
from rollserve.dialect.generate_content import GenerateContentDialect
from rollserve.dialect.google_schema import json_schema
from rollserve.dialect.marks import mark
from rollserve.errors import ContextTooLong, InvalidInput, MethodNotAllowed
from rollserve.records.call import Message, ToolCall
from rollserve.testing.dialect_cases import mutated
from rollserve.testing.dialect_conformance import examples

DIALECT = GenerateContentDialect()
HI = {"role": "user", "parts": [{"text": "hi"}]}
GENERATE = Target(operation="generate", model="m", stream=False)


def parse(
    *contents: Any, target: Target = GENERATE, query: dict[str, str] | None = None, **body: Any
) -> Asked:
    document = {"contents": contents or [HI], **body}
    return DIALECT.parse(target, json.dumps(document).encode(), {}, query or {})


def messages(*contents: Any) -> tuple[Message, ...]:
    return parse(*contents).request.messages


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": parts}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": parts}


def call(name: str, **extra: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {"a": 1}, **extra}}


def result(name: str, output: str, **extra: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": output}, **extra}}


def called(name: str, call_id: str = "") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments='{"a":1}')


def answered(output: str, call_id: str | None, name: str | None = None) -> Message:
    return Message(role="tool", content=output, tool_call_id=call_id, name=name)


def test_a_turn_of_gemini_cli() -> None:
    """A system instruction with the role ``user``; thoughts dropped, the signature kept on the call."""
    asked = parse(
        user({"text": "a"}, {"text": "b"}),
        model(
            {"text": "I will."}, call("f", id="c1") | {"thoughtSignature": mark("mc_1")}, call("g", id="c2")
        ),
        user(result("g", "two", id="c2"), result("f", "one", id="c1"), {"text": "and?"}),
        systemInstruction={"role": "user", "parts": [{"text": "You are"}, {"text": " it."}]},
    )
    said = (called("f", "c1"), called("g", "c2"))
    assert asked.request.messages == (
        Message(role="system", content="You are it."),
        Message(role="user", content="ab"),
        Message(role="assistant", content="I will.", tool_calls=said, call_id="mc_1"),
        answered("two", "c2"),
        answered("one", "c1"),
        Message(role="user", content="and?"),
    )


def test_both_spellings_at_every_level() -> None:
    camel = {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            HI,
            model({"text": "hm", "thought": True, "thoughtSignature": mark("mc_1")}, call("f", id="c")),
            user({"functionResponse": {"name": "f", "id": "c", "response": {"some_key": 1}}}),
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "maxOutputTokens": 5,
            "stopSequences": ["END"],
            "responseMimeType": "application/json",
            "responseJsonSchema": {"type": "object"},
            "thinkingConfig": {"includeThoughts": False},
        },
    }
    snake = json.loads(_snake(json.dumps(camel)))
    assert "function_declarations" in json.dumps(snake)
    one, other = (DIALECT.parse(GENERATE, json.dumps(each).encode(), {}, {}) for each in (camel, snake))
    assert one.request.messages == other.request.messages
    assert one.request.messages[3].content == '{"some_key":1}'
    for name in ("tools", "stop", "schema"):
        assert getattr(one.request, name) == getattr(other.request, name), name
    assert one.form == other.form
    assert other.request.asked["max_tokens"] == 5


def _snake(text: str) -> str:
    """JSON text with its names in snake_case."""
    names = re.compile(r'"[a-z]+(?:[A-Z][a-z]+)+":')
    return names.sub(lambda name: re.sub("[A-Z]", lambda c: f"_{c[0].lower()}", name[0]), text)


def test_without_ids_results_find_their_calls_by_name_and_order() -> None:
    assert messages(
        HI,
        model(call("f"), call("g"), call("f")),
        user(result("g", "g1"), result("f", "f1"), result("f", "f2")),
    )[1:] == (
        Message(role="assistant", tool_calls=(called("f"), called("g"), called("f"))),
        answered("g1", "#1", "g"),
        answered("f1", "#0", "f"),
        answered("f2", "#2", "f"),
    )


def test_an_id_that_only_one_side_kept() -> None:
    assert messages(HI, model(call("f", id="c1")), user(result("f", "x")))[2] == answered("x", "c1", "f")
    assert messages(HI, model(call("f")), user(result("f", "x", id="c1")))[2] == answered("x", "c1")


def test_results_that_fit_no_call() -> None:
    found = messages(HI, model(call("f")), user(result("h", "a"), result("f", "b"), result("f", "c")))
    assert found[2:] == (answered("a", None, "h"), answered("b", "#0", "f"), answered("c", None, "f"))
    later = messages(HI, model(call("f")), model({"text": "no"}), user(result("f", "a")))
    assert later[3] == answered("a", None, "f")


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ({"output": "text"}, "text"),
        ({"output": {"a": [1]}}, '{"a":[1]}'),
        ({"output": "text", "exit": 0}, '{"output":"text","exit":0}'),
        ({"result": "text"}, '{"result":"text"}'),
        ({"error": "no"}, '{"error":"no"}'),
        ({}, "{}"),
    ],
)
def test_what_a_result_says(response: dict[str, Any], content: str) -> None:
    part = {"functionResponse": {"name": "f", "id": "c", "response": response}}
    assert messages(user(part)) == (answered(content, "c"),)


@pytest.mark.parametrize("signature", ["skip_thought_signature_validator", "EqQBCkYI", "", "é", None])
def test_signatures_of_others_say_nothing(signature: str | None) -> None:
    said = messages(HI, model({"text": "a", "thoughtSignature": signature}))[1]
    assert said == Message(role="assistant", content="a")


@pytest.mark.parametrize("call_id", ["mc_1", "mc_~~~???", "mc_12"])
def test_signatures_that_were_decoded_and_encoded_again(call_id: str) -> None:
    """The SDK holds them as bytes, and sends them in the other alphabet."""
    again = mark(call_id).replace("+", "-").replace("/", "_").rstrip("=")
    assert messages(HI, model({"text": "a", "thoughtSignature": again}))[1].call_id == call_id


def test_a_signature_alone() -> None:
    part = {"thoughtSignature": mark("mc_1")}
    assert messages(HI, model({"text": "a"}, part))[1].call_id == "mc_1"


def test_arguments_that_are_no_object_come_back_as_they_were() -> None:
    broken = {"functionCall": {"name": "f", "args": {"__unparsedToolInput": {"raw": '{"a'}}}}
    assert messages(HI, model(broken))[1].tool_calls == (ToolCall(id="", name="f", arguments='{"a'),)


def test_roles() -> None:
    assert messages({"parts": [{"text": "a"}]}) == (Message(role="user", content="a"),)
    assert messages({"role": "function", "parts": [result("f", "a", id="c")]}) == (answered("a", "c"),)
    assert messages({"role": "user"}) == (Message(role="user"),)


def test_functions() -> None:
    declarations = [
        {"name": "f", "description": "d", "parameters": {"type": "OBJECT", "properties": {"type": {}}}},
        {"name": "g", "parametersJsonSchema": {"type": "object", "$ref": "#"}, "response": {}},
        {"name": "h"},
    ]
    tools = [{"functionDeclarations": declarations[:1]}, {"functionDeclarations": declarations[1:]}]
    assert [tool["function"] for tool in parse(tools=tools).request.tools] == [
        {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"type": {}}}},
        {"name": "g", "parameters": {"type": "object", "$ref": "#"}},
        {"name": "h"},
    ]


def test_tools_of_googles_servers_are_left_out_and_said_so() -> None:
    declared = {"functionDeclarations": [{"name": "f"}]}
    request = parse(tools=[{"google_search": {}}, declared]).request
    assert [tool["function"]["name"] for tool in request.tools] == ["f"]
    assert request.asked["tools_left_out"] == ["googleSearch"]
    with pytest.raises(InvalidInput, match="googleSearch"):
        parse(tools=[{"googleSearch": {}}])


@pytest.mark.parametrize(
    ("mode", "count"), [("AUTO", 1), ("ANY", 1), ("VALIDATED", 1), ("any", 1), ("NONE", 0)]
)
def test_the_mode_of_calling_is_advice(mode: str, count: int) -> None:
    given = {"functionCallingConfig": {"mode": mode}}
    request = parse(tools=[{"functionDeclarations": [{"name": "f"}]}], toolConfig=given).request
    assert len(request.tools) == count
    assert request.asked["toolConfig"] == given


def test_generation_config() -> None:
    config = {
        "maxOutputTokens": 5,
        "temperature": 0.5,
        "topK": 3,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": -1},
        "candidateCount": 2,
        "responseLogprobs": True,
        "stopSequences": ["END"],
        "responseModalities": ["TEXT"],
    }
    asked = parse(generationConfig=config, safetySettings=[], labels={"a": "b"})
    assert (asked.n, asked.logprobs, asked.request.stop) == (2, True, ("END",))
    kept = ("temperature", "topK", "thinkingConfig", "responseModalities")
    assert asked.request.asked == {
        "safetySettings": [],
        "labels": {"a": "b"},
        "max_tokens": 5,
        "generationConfig": {name: config[name] for name in kept},
    }


@pytest.mark.parametrize(
    ("config", "schema"),
    [
        ({}, None),
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, {}),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "STRING", "nullable": True}},
            {"type": ["string", "null"]},
        ),
        (
            {"responseMimeType": "application/json", "responseJsonSchema": {"type": "OBJECT"}},
            {"type": "object"},
        ),
    ],
)
def test_the_schema_of_the_answer(config: dict[str, Any], schema: Any) -> None:
    assert parse(generationConfig=config).request.schema == schema


def test_schemas_of_googles() -> None:
    theirs = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "enum": ["STRING"]},
            "any_of": {"any_of": [{"type": "INTEGER"}, {"type": "NULL"}]},
            "list": {"type": "ARRAY", "items": {"type": "NUMBER"}, "min_items": "1", "maxItems": 3},
        },
        "property_ordering": ["type"],
        "default": {"type": "OBJECT"},
    }
    assert json_schema(theirs) == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["STRING"]},
            "any_of": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "list": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        },
        "propertyOrdering": ["type"],
        "default": {"type": "OBJECT"},
    }


def test_json_schemas_stay_as_they_are() -> None:
    schema = {
        "$defs": {"a": {"type": ["string", "null"], "minLength": 1}},
        "properties": {"items": {"items": [{"$ref": "#/$defs/a"}, True]}},
        "additionalProperties": False,
        "nullable": True,
        "oneOf": [{"not": {"const": {"type": "STRING"}}}],
    }
    assert json_schema(schema) == schema


def test_counting_a_request_within_a_request() -> None:
    inner = {"model": "models/m", "contents": [HI], "system_instruction": {"parts": [{"text": "s"}]}}
    body = json.dumps({"generateContentRequest": inner}).encode()
    asked = DIALECT.parse(Target(operation="count", model="m"), body, {}, {})
    assert [message.role for message in asked.request.messages] == ["system", "user"]


DEEP: dict[str, Any] = {}
for _ in range(80):
    DEEP = {"a": DEEP}
INLINE = {"inlineData": {"mimeType": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"contents": []}, "contents"),
        ({"contents": ["hi"]}, "contents.0"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents.0.role"),
        ({"contents": [{"role": [], "parts": []}]}, "contents.0.role"),
        ({"contents": [user(INLINE)]}, "contents.0.parts.0.inlineData"),
        ({"contents": [user({"text": "a"}, {"file_data": {}})]}, "contents.0.parts.1.fileData.fileUri"),
        ({"contents": [model(INLINE)]}, "contents.0.parts.0"),
        (
            {"contents": [user({"inlineData": {"mimeType": "video/mp4", "data": "AA=="}})]},
            "contents.0.parts.0.inlineData",
        ),
        ({"contents": [user({})]}, "contents.0.parts.0"),
        ({"contents": [user({"text": 3})]}, "contents.0.parts.0.text"),
        ({"contents": [user({"functionCall": {}, "function_call": {}})]}, "contents.0.parts.0"),
        ({"contents": [user(call("f"))]}, "contents.0.parts.0.functionCall"),
        ({"contents": [model(result("f", "a"))]}, "contents.0.parts.0.functionResponse"),
        ({"contents": [model({"functionCall": {}})]}, "contents.0.parts.0.functionCall.name"),
        ({"contents": [model(call("f", args=DEEP))]}, "contents.0.parts.0.functionCall.args"),
        (
            {"contents": [user({"functionResponse": {"name": "f", "response": DEEP}})]},
            "contents.0.parts.0.functionResponse.response",
        ),
        (
            {"contents": [user({"functionResponse": {"name": "f", "parts": [INLINE]}})]},
            "contents.0.parts.0.functionResponse.parts.0.inlineData",
        ),
        ({"systemInstruction": {"parts": [INLINE]}}, "systemInstruction.parts.0"),
        ({"cachedContent": "c"}, "cachedContent"),
        ({"tools": [3]}, "tools.0"),
        ({"tools": [{"functionDeclarations": {"a": 1}}]}, "tools.0.functionDeclarations"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools.0.functionDeclarations.0.name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": DEEP}]}]},
            "tools.0.functionDeclarations.0.parameters",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
            "toolConfig.functionCallingConfig.mode",
        ),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"candidateCount": 1000}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"logprobs": 5}}, "generationConfig.logprobs"),
        ({"generationConfig": {"stopSequences": [""]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseSchema": DEEP}}, "generationConfig.responseSchema"),
        ({"generationConfig": {"speechConfig": {"a": 1}}}, "generationConfig.speechConfig"),
        ({"generationConfig": {"seed": 2**80}}, "generationConfig"),
        ({"safetySettings": [DEEP]}, "safetySettings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        DIALECT.parse(GENERATE, json.dumps({"contents": [HI], **body}).encode(), {}, {})
    assert caught.value.field == field


def test_a_context_that_is_too_long_is_said_in_googles_words() -> None:
    error = ContextTooLong("too long", prompt_tokens=12, context_tokens=10)
    assert json.loads(DIALECT.error(error, 400))["error"]["message"] == (
        "The input token count (12) exceeds the maximum number of tokens allowed (10)."
    )


@pytest.mark.parametrize("prefix", ["/v1beta", "/v1", "/v1alpha", ""])
def test_paths(prefix: str) -> None:
    def target(method: str, path: str) -> Target | None:
        return DIALECT.target(method, prefix + path)

    assert target("POST", "/models/a/b:8b:generateContent") == Target(
        operation="generate", model="a/b:8b", stream=False
    )
    assert target("POST", "/models/m:streamGenerateContent") == Target(
        operation="generate", model="m", stream=True
    )
    assert target("POST", "/models/m:countTokens") == Target(operation="count", model="m", stream=False)
    assert target("GET", "/models") == Target(operation="models")
    assert target("GET", "/models/m:8b") == Target(operation="models", model="m:8b")
    assert target("POST", "/models/m:embedContent") is None
    assert target("POST", "/modelsx") is None
    for method, path in (("GET", "/models/m:generateContent"), ("POST", "/models")):
        with pytest.raises(MethodNotAllowed):
            target(method, path)


def test_whose_client_it_is() -> None:
    assert DIALECT.speaks({"x-goog-api-key": "k"})
    assert not DIALECT.speaks({"authorization": "Bearer x"})


EVERYTHING: dict[str, Any] = {
    "system_instruction": {"role": "user", "parts": [{"text": "s"}]},
    "contents": [
        HI,
        model(
            {"text": "hm", "thought": True, "thoughtSignature": mark("mc_1")}, call("f"), call("g", id="c")
        ),
        user(result("f", "a"), {"function_response": {"name": "g", "id": "c", "response": {"a": {"b": 1}}}}),
    ],
    "tools": [
        {"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "properties": {"a": {}}}}]},
        {"function_declarations": [{"name": "g", "parameters_json_schema": {"anyOf": [{"min_items": "1"}]}}]},
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "generationConfig": {
        "maxOutputTokens": 5,
        "stopSequences": ["END"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "STRING", "nullable": True},
        "candidateCount": 2,
        "responseLogprobs": True,
        "responseModalities": ["TEXT"],
        "thinking_config": {"include_thoughts": False},
    },
    "safetySettings": [],
}


@examples
@given(document=mutated(EVERYTHING), operation=st.sampled_from(["generate", "count"]), inner=st.booleans())
def test_a_broken_request_is_refused_or_served(document: Any, operation: Any, inner: bool) -> None:
    body = {"generateContentRequest": document} if inner else document
    try:
        asked = DIALECT.parse(Target(operation=operation), json.dumps(body).encode(), {}, {})
    except InvalidInput as error:
        outcome = error.field
    else:
        msgspec.msgpack.encode(asked.request)
        outcome = "served"
    assert outcome
