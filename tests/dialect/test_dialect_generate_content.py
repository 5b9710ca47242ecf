"""Google's generateContent with the official client: what it sends, and what it makes of our answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from rollserve.dialect.base import Answered, Piece, TokenLogprob
from rollserve.dialect.generate_content import GenerateContentDialect
from rollserve.dialect.tool_input import as_arguments, as_object
from rollserve.errors import ContextTooLong
from rollserve.records.call import ChatRequest, Message, ToolCall
from rollserve.records.image import Image
from rollserve.testing.dialect_cases import PICTURES, parts_of
from rollserve.testing.dialect_conformance import DialectConformance
from rollserve.testing.dialect_subject import CREATED_S, DialectSubject, Heard, Sent, meaning

from .wire import Wire

HI = ChatRequest(messages=(Message(role="user", content="hi"),))


class OfficialWire(Wire):
    def __init__(self) -> None:
        super().__init__()
        self.client = genai.Client(
            api_key="k",
            vertexai=False,
            http_options=types.HttpOptions(base_url="http://gateway", httpx_client=self.http),
        )


class Subject(DialectSubject):
    dialect = GenerateContentDialect()
    choices = 8
    logprobs = True
    known_path = "/v1beta/models/m:generateContent"

    def __init__(self) -> None:
        self.wire = OfficialWire()

    def send(self, request: ChatRequest, *, stream: bool = False, n: int = 1, logprobs: bool = False) -> Sent:
        config = _config(request, candidate_count=n, response_logprobs=logprobs or None)
        return self._send(_contents(request.messages), config, stream)

    def send_after(self, request: ChatRequest, answer: bytes, then: Sequence[Message]) -> Sent:
        kept = types.GenerateContentResponse.model_validate_json(answer).candidates
        assert kept is not None
        assert kept[0].content is not None
        contents = [*_contents(request.messages), kept[0].content, *_contents(then, request, kept[0].content)]
        return self._send(contents, _config(request), False)

    def _send(self, contents: list[types.Content], config: types.GenerateContentConfig, stream: bool) -> Sent:
        models = self.wire.client.models
        if stream:
            self.wire.streams(b"")
            list(models.generate_content_stream(model="m", contents=contents, config=config))
        else:
            self.wire.answers(b"{}")
            models.generate_content(model="m", contents=contents, config=config)
        return self.wire.sent()

    def read(self, answer: bytes) -> list[Heard]:
        self.wire.answers(answer)
        return _heard([self.wire.client.models.generate_content(model="m", contents="hi")])

    def read_stream(self, stream: bytes) -> list[Heard]:
        self.wire.streams(stream)
        return _heard(list(self.wire.client.models.generate_content_stream(model="m", contents="hi")))

    def read_error(self, body: bytes) -> str:
        self.wire.answers(body, status=400)
        with pytest.raises(errors.APIError) as caught:
            self.wire.client.models.generate_content(model="m", contents="hi")
        assert caught.value.status == json.loads(body)["error"]["status"]
        return str(caught.value.message)

    def read_failure(self, stream: bytes) -> str:
        self.wire.streams(stream)
        with pytest.raises(errors.APIError) as caught:
            list(self.wire.client.models.generate_content_stream(model="m", contents="hi"))
        return str(caught.value.message)

    def read_models(self, body: bytes) -> list[str]:
        self.wire.answers(body)
        found = [(model.name or "").removeprefix("models/") for model in self.wire.client.models.list()]
        sent = self.wire.sent()
        target = self.dialect.target(sent.method, sent.path)
        assert target is not None
        assert target.operation == "models"
        assert self.dialect.speaks(sent.headers)
        return found


def _config(request: ChatRequest, **fields: Any) -> types.GenerateContentConfig:
    system = next((m.content for m in request.messages if m.role == "system"), None)
    declared = [
        types.FunctionDeclaration(
            name=tool["function"]["name"],
            description=tool["function"]["description"],
            parameters_json_schema=tool["function"]["parameters"],
        )
        for tool in request.tools
    ]
    tools: Any = [types.Tool(function_declarations=declared)] if declared else None
    return types.GenerateContentConfig(system_instruction=system, tools=tools, **fields)


def _contents(
    messages: Sequence[Message], request: ChatRequest | None = None, last: types.Content | None = None
) -> list[types.Content]:
    """As a client of Google's holds them: results of one turn in one content."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for part in (last.parts or ()) if last else ():
        if part.function_call is not None:
            names[part.function_call.id or ""] = part.function_call.name or ""
    made: list[types.Content] = []
    for message in messages:
        if message.role == "system":
            continue
        parts = _parts(message, names)
        if message.role == "tool" and made and _is_result(made[-1]):
            made[-1].parts = [*(made[-1].parts or ()), *parts]
        else:
            made.append(types.Content(role="model" if message.role == "assistant" else "user", parts=parts))
    return made


def _is_result(content: types.Content) -> bool:
    return any(part.function_response is not None for part in content.parts or ())


def _parts(message: Message, names: dict[str, str]) -> list[types.Part]:
    if message.role == "tool":
        of = message.tool_call_id or ""
        output = {"output": message.content}
        return [
            types.Part(
                function_response=types.FunctionResponse(
                    id=of,
                    name=names.get(of, "f"),
                    response=output,
                    parts=[_result_part(image) for image in message.images] or None,
                )
            )
        ]
    parts = [types.Part(text=message.reasoning, thought=True)] if message.reasoning else []
    parts += [_part(part) for part in parts_of(message)]
    for call in message.tool_calls:
        called = types.FunctionCall(id=call.id, name=call.name, args=as_object(call.arguments))
        parts.append(types.Part(function_call=called))
    return parts


def _part(part: str | Image) -> types.Part:
    if isinstance(part, str):
        return types.Part(text=part)
    if part.url is not None:
        return types.Part(file_data=types.FileData(file_uri=part.url))
    return types.Part.from_bytes(data=PICTURES[part.digest], mime_type=part.media_type)


def _result_part(image: Image) -> types.FunctionResponsePart:
    if image.url is not None:
        return types.FunctionResponsePart(file_data=types.FunctionResponseFileData(file_uri=image.url))
    blob = types.FunctionResponseBlob(data=PICTURES[image.digest], mime_type=image.media_type)
    return types.FunctionResponsePart(inline_data=blob)


def _heard(chunks: list[types.GenerateContentResponse]) -> list[Heard]:
    """Chunks put together, as a client does: the texts added up, the last usage."""
    candidates: dict[int, list[types.Candidate]] = {}
    for chunk in chunks:
        for candidate in chunk.candidates or ():
            candidates.setdefault(candidate.index or 0, []).append(candidate)
    usage = chunks[-1].usage_metadata
    assert usage is not None
    return [_candidate(candidates[index], usage) for index in sorted(candidates)]


def _candidate(chunks: list[types.Candidate], usage: types.GenerateContentResponseUsageMetadata) -> Heard:
    contents = [chunk.content for chunk in chunks if chunk.content is not None]
    parts = [part for content in contents for part in content.parts or ()]
    texts = [(part.thought, part.text) for part in parts if part.text is not None]
    called = [part.function_call for part in parts if part.function_call is not None]
    calls = tuple(
        ToolCall(id=call.id or "", name=call.name or "", arguments=as_arguments(call.args or {}))
        for call in called
    )
    (finish,) = (chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None)
    found = chunks[-1].logprobs_result
    chosen = (found.chosen_candidates or []) if found is not None else []
    tokens = tuple(TokenLogprob(each.token or "", each.log_probability or 0.0) for each in chosen)
    reason = {"STOP": "tool_calls" if calls else "stop", "MAX_TOKENS": "length"}[finish.value]
    return Heard(
        message=Message(
            role="assistant",
            content="".join(text for thought, text in texts if not thought),
            reasoning="".join(text for thought, text in texts if thought) or None,
            tool_calls=calls,
        ),
        finish_reason=reason,
        prompt_tokens=usage.prompt_token_count,
        sampled_tokens=usage.candidates_token_count,
        cached_tokens=usage.cached_content_token_count or 0,
        tokens=None if found is None else tokens,
    )


class TestGenerateContent(DialectConformance):
    @pytest.fixture
    def subject(self) -> DialectSubject:
        return Subject()


def _answer(message: Message, **fields: Any) -> Answered:
    told = {"finish_reason": "stop", "prompt_tokens": 7, "sampled_tokens": 3, **fields}
    return Answered(call_id="mc_1", message=message, **told)


SAID = Message(
    role="assistant",
    content="yes",
    reasoning="hm",
    tool_calls=(
        ToolCall(id="c1", name="f", arguments='{"a":1}'),
        ToolCall(id="c2", name="g", arguments="{}"),
    ),
)


def test_the_signature_stands_on_the_first_call() -> None:
    """Gemini CLI drops the text of thoughts, and keeps what stands on calls."""
    subject = Subject()
    asked = subject.parse(subject.send(HI))
    whole = json.loads(subject.dialect.whole(asked, [_answer(SAID)], created_s=CREATED_S))
    signed = ["thoughtSignature" in part for part in whole["candidates"][0]["content"]["parts"]]
    assert signed == [False, False, True, False]


def test_a_streamed_turn_leads_back_to_its_call() -> None:
    subject = Subject()
    asked = subject.parse(subject.send(HI, stream=True))
    for message in (SAID, Message(role="assistant", content="yes")):
        stream = subject.stream(asked, [_answer(message)], [1], 9)
        events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: ")]
        parts = [part for each in events for part in each["candidates"][0]["content"]["parts"]]
        contents = [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": parts}]
        target = subject.dialect.target("POST", subject.known_path)
        assert target is not None
        back = subject.dialect.parse(target, json.dumps({"contents": contents}).encode(), {}, {})
        assert back.request.messages[1].call_id == "mc_1"
        assert meaning(back.request.messages[1:]) == meaning([message])


def test_the_stream_as_one_array() -> None:
    """Without ``alt=sse``: valid JSON whenever it ends."""
    subject = Subject()
    sent = subject.send(HI, stream=True)
    target = subject.dialect.target(sent.method, sent.path)
    assert target is not None
    asked = subject.dialect.parse(target, sent.body, {}, {})
    stream = subject.stream(asked, [_answer(SAID)], [1], 9)
    chunks = [types.GenerateContentResponse.model_validate(each) for each in json.loads(stream)]
    assert meaning([_heard(chunks)[0].message]) == meaning([SAID])
    writer = subject.dialect.writer(asked, stream_id="mc_1", created_s=CREATED_S)
    assert writer.media_type == "application/json"
    failed = writer.opening() + writer.failure(ContextTooLong("too long"), 400)
    assert json.loads(failed)[0]["error"]["status"] == "INVALID_ARGUMENT"
    begun = writer.opening() + writer.piece(Piece("content", "a")) + writer.keep_alive()
    assert not begun.endswith(b"]")


def test_thoughts_that_are_not_wanted() -> None:
    subject = Subject()
    config = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=False))
    asked = subject.parse(subject._send(_contents(HI.messages), config, True))
    (heard,) = subject.read_stream(subject.stream(asked, [_answer(SAID)], [1], 9))
    (whole,) = subject.read(subject.dialect.whole(asked, [_answer(SAID)], created_s=CREATED_S))
    assert heard == whole
    assert heard.message.reasoning is None


def test_tokens_are_counted() -> None:
    subject = Subject()
    subject.wire.answers(b'{"totalTokens": 42}')
    counted = subject.wire.client.models.count_tokens(model="m", contents="hi")
    sent = subject.wire.sent()
    target = subject.dialect.target(sent.method, sent.path)
    assert target is not None
    assert (target.operation, target.model) == ("count", "m")
    asked = subject.dialect.parse(target, sent.body, sent.headers, sent.query)
    assert asked.request.messages == HI.messages
    assert counted.total_tokens == json.loads(subject.dialect.counted(asked, 42))["totalTokens"]


def test_one_model() -> None:
    subject = Subject()
    subject.wire.answers(subject.dialect.model("policy", created_s=CREATED_S))
    found = subject.wire.client.models.get(model="policy")
    sent = subject.wire.sent()
    target = subject.dialect.target(sent.method, sent.path)
    assert target is not None
    assert (target.operation, target.model, found.name) == ("models", "policy", "models/policy")
