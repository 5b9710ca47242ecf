"""What any dialect must do. Subclass it in a test module and give it a ``subject``::

    class TestMine(DialectConformance):
        @pytest.fixture
        def subject(self) -> DialectSubject:
            return MySubject()

The subject is the provider's client: it puts our records into a request as that client does, and reads
answers with the client's own types. What comes back must be what was meant: nothing lost, nothing
invented.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollserve.dialect.base import Answered, Asked, Piece, TokenLogprob
from rollserve.errors import (
    BackendUnavailable,
    ContextTooLong,
    InvalidInput,
    LimitReached,
    MethodNotAllowed,
    RollserveError,
    SessionClosed,
    TooLarge,
)
from rollserve.records.call import ChatRequest, Message, ToolCall
from rollserve.testing.dialect_cases import (
    BROKEN_BODIES,
    HARD_ARGUMENTS,
    HARD_TEXTS,
    PICTURES,
    answers,
    conversations,
    documents,
    model_turns,
    mutated,
    pieces_of,
    tool,
    turns,
)
from rollserve.testing.dialect_subject import CREATED_S, DialectSubject, Heard, meaning

STREAM_ID = "mc_conformance"
ERRORS: tuple[tuple[RollserveError, int], ...] = (
    (InvalidInput("no such thing", field="tools.0.type", hint="leave it out"), 400),
    (ContextTooLong("maximum context length is 10 tokens, the prompt has 12", field="messages"), 400),
    (SessionClosed("this session is over"), 400),
    (LimitReached("max_turns", "all 3 turns are used"), 400),
    (TooLarge("the body is too large", field="body"), 413),
    (BackendUnavailable("nothing answered"), 503),
    (RollserveError("internal error: KeyError"), 500),
)

examples = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


class DialectConformance:
    @pytest.fixture
    def subject(self) -> DialectSubject:
        raise NotImplementedError

    @examples
    @given(messages=conversations(), stream=st.booleans())
    def test_a_conversation_round_trips(
        self, subject: DialectSubject, messages: tuple[Message, ...], stream: bool
    ) -> None:
        request = ChatRequest(messages=messages, tools=(tool("shell"), tool("edit")))
        asked = subject.parse(subject.send(request, stream=stream))
        assert meaning(asked.request.messages) == meaning(subject.normal(messages))
        assert [each["function"]["name"] for each in asked.request.tools] == ["shell", "edit"]
        assert asked.stream is stream
        brought = {key: picture.data for key, picture in asked.request.pictures.items()}
        images = [image for message in messages for image in message.images]
        assert brought == {image.key: PICTURES.get(image.digest) for image in images}
        assert all(picture.place for picture in asked.request.pictures.values())
        _storable(asked)

    def test_tools_keep_their_names_descriptions_and_parameters(self, subject: DialectSubject) -> None:
        offered = (tool("shell"), tool("edit", description="Änder <it>\n\x00"))
        asked = subject.parse(subject.send(_request(tools=offered)))
        for given_tool, read_tool in zip(offered, asked.request.tools, strict=True):
            for key in ("name", "description", "parameters"):
                assert read_tool["function"][key] == given_tool["function"][key], key

    @examples
    @given(answer=answers())
    def test_an_answer_is_read_as_it_was_given(self, subject: DialectSubject, answer: Answered) -> None:
        asked = subject.parse(subject.send(_request()))
        (heard,) = subject.read(subject.dialect.whole(asked, [answer], created_s=CREATED_S))
        _check(subject, heard, answer)

    @examples
    @given(
        answer=answers(),
        cuts=st.lists(st.integers(0, 30), max_size=6),
        told=st.integers(0, 8),
    )
    def test_a_stream_says_what_the_whole_says(
        self, subject: DialectSubject, answer: Answered, cuts: list[int], told: int
    ) -> None:
        asked = subject.parse(subject.send(_request(), stream=True))
        (heard,) = subject.read_stream(subject.stream(asked, [answer], cuts, told))
        (whole,) = subject.read(subject.dialect.whole(asked, [answer], created_s=CREATED_S))
        assert heard == whole

    @examples
    @given(message=model_turns(), cuts=st.lists(st.integers(0, 30), max_size=3), told=st.integers(0, 5))
    def test_reasoning_that_is_known_late(
        self, subject: DialectSubject, message: Message, cuts: list[int], told: int
    ) -> None:
        """Some of the text was let out before it was known that there is reasoning."""
        asked = subject.parse(subject.send(_request(), stream=True))
        writer = subject.dialect.writer(asked, stream_id=STREAM_ID, created_s=CREATED_S)
        pieces = pieces_of(message, cuts)
        content = [piece for piece in pieces if piece.kind == "content"]
        early = content[:told]
        rest = [*(piece for piece in pieces if piece.kind == "reasoning"), *content[told:]]
        parts = [writer.opening(), *(writer.piece(piece) for piece in early)]
        parts.append(writer.closing([_answer(message)], [rest]))
        (heard,) = subject.read_stream(b"".join(parts))
        assert meaning([heard.message]) == meaning([message])

    @examples
    @given(given_answers=st.lists(answers(), min_size=2, max_size=4), told=st.integers(0, 8))
    def test_several_choices(self, subject: DialectSubject, given_answers: list[Answered], told: int) -> None:
        if subject.choices < 2:
            pytest.skip("this provider gives one answer to a request")
        asked = subject.parse(subject.send(_request(), stream=True, n=len(given_answers)))
        assert asked.n == len(given_answers)
        whole = subject.read(subject.dialect.whole(asked, given_answers, created_s=CREATED_S))
        streamed = subject.read_stream(subject.stream(asked, given_answers, [3, 9], told))
        expected = [meaning([answer.message]) for answer in given_answers]
        assert [meaning([heard.message]) for heard in whole] == expected
        assert [meaning([heard.message]) for heard in streamed] == expected
        assert [heard.finish_reason for heard in streamed] == [heard.finish_reason for heard in whole]

    @examples
    @given(answer=answers())
    def test_a_turn_comes_back_as_it_was_said(self, subject: DialectSubject, answer: Answered) -> None:
        request = _request()
        whole = subject.dialect.whole(subject.parse(subject.send(request)), [answer], created_s=CREATED_S)
        results = [
            Message(role="tool", content="out", tool_call_id=call.id, name=None)
            for call in answer.message.tool_calls
        ]
        then = (*results, Message(role="user", content="go on"))
        asked = subject.parse(subject.send_after(request, whole, then))
        expected = subject.normal((*request.messages, answer.message, *then))
        assert meaning(asked.request.messages) == meaning(expected)
        marks = {message.call_id for message in asked.request.messages} - {None}
        assert marks <= {answer.call_id}
        if subject.marks:
            assert marks == {answer.call_id}

    @pytest.mark.parametrize("arguments", HARD_ARGUMENTS)
    def test_arguments_that_are_no_object_reach_the_agent(
        self, subject: DialectSubject, arguments: str
    ) -> None:
        call = ToolCall(id="call_1", name="shell", arguments=arguments, error="it is broken")
        answer = _answer(Message(role="assistant", tool_calls=(call,)), "tool_calls")
        asked = subject.parse(subject.send(_request(), stream=True))
        whole = subject.dialect.whole(asked, [answer], created_s=CREATED_S)
        (heard,) = subject.read(whole)
        (streamed,) = subject.read_stream(subject.stream(asked, [answer], [], 0))
        assert heard == streamed
        assert [each.id for each in heard.message.tool_calls] == ["call_1"]
        subject.parse(subject.send_after(_request(), whole, [_result("call_1")]))

    @pytest.mark.parametrize("text", HARD_TEXTS)
    def test_text_arrives_whole(self, subject: DialectSubject, text: str) -> None:
        answer = _answer(Message(role="assistant", content=text, reasoning=text))
        asked = subject.parse(subject.send(_request(), stream=True))
        cuts = [1, 2, 3, len(text) // 2]
        (heard,) = subject.read_stream(subject.stream(asked, [answer], cuts, 3))
        assert (heard.message.content, heard.message.reasoning) == (text, text)

    @pytest.mark.parametrize("reason", ["stop", "length", "abort"])
    def test_why_it_ended(self, subject: DialectSubject, reason: str) -> None:
        answer = _answer(Message(role="assistant", content="a"), reason)
        asked = subject.parse(subject.send(_request(), stream=True))
        whole = subject.dialect.whole(asked, [answer], created_s=CREATED_S)
        for (heard,) in (
            subject.read(whole),
            subject.read_stream(subject.stream(asked, [answer], [], 1)),
        ):
            assert heard.finish_reason == subject.finish(reason)

    def test_logprobs(self, subject: DialectSubject) -> None:
        if not subject.logprobs:
            pytest.skip("this provider's clients can't ask for them")
        tokens = (TokenLogprob("é", -0.5), TokenLogprob("<|end|>", 0.0))
        answer = _answer(Message(role="assistant", content="é"), tokens=tokens)
        asked = subject.parse(subject.send(_request(), stream=True, logprobs=True))
        assert asked.logprobs
        whole = subject.dialect.whole(asked, [answer], created_s=CREATED_S)
        for (heard,) in (
            subject.read(whole),
            subject.read_stream(subject.stream(asked, [answer], [], 1)),
        ):
            assert heard.tokens == tokens
        assert not subject.parse(subject.send(_request())).logprobs

    def test_the_opening_and_keep_alives_say_nothing(self, subject: DialectSubject) -> None:
        asked = subject.parse(subject.send(_request(), stream=True))
        writer = subject.dialect.writer(asked, stream_id=STREAM_ID, created_s=CREATED_S)
        answer = _answer(Message(role="assistant", content="x"))
        parts = [writer.opening(), *(writer.keep_alive() for _ in range(3))]
        parts.append(writer.closing([answer], [[Piece("content", "x")]]))
        assert all(part.endswith(b"\n\n") for part in parts if part)
        assert not any(line.startswith(b":") for line in b"".join(parts).splitlines())
        (heard,) = subject.read_stream(b"".join(parts))
        assert meaning([heard.message]) == meaning([answer.message])

    @pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: getattr(value, "code", value))
    def test_errors_are_in_the_providers_form(
        self, subject: DialectSubject, error: RollserveError, status: int
    ) -> None:
        assert error.message in subject.read_error(subject.dialect.error(error, status))

    @pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: getattr(value, "code", value))
    @pytest.mark.parametrize("told", [0, 2])
    def test_a_failure_within_a_stream(
        self, subject: DialectSubject, error: RollserveError, status: int, told: int
    ) -> None:
        asked = subject.parse(subject.send(_request(), stream=True))
        writer = subject.dialect.writer(asked, stream_id=STREAM_ID, created_s=CREATED_S)
        parts = [writer.opening()]
        parts += [writer.piece(Piece("content", "x"), choice=0) for _ in range(told)]
        parts.append(writer.failure(error, status))
        assert error.message in subject.read_failure(b"".join(parts))

    def test_models(self, subject: DialectSubject) -> None:
        body = subject.dialect.models(["policy", "other"], created_s=CREATED_S)
        assert subject.read_models(body) == ["policy", "other"]

    def test_paths(self, subject: DialectSubject) -> None:
        assert subject.dialect.target("GET", "/no/such/path") is None
        assert subject.dialect.target("POST", "") is None
        sent = subject.send(_request())
        target = subject.dialect.target(sent.method, sent.path)
        assert target is not None
        assert target.operation == "generate"
        with pytest.raises(MethodNotAllowed):
            subject.dialect.target(subject.wrong_method, sent.path)

    @pytest.mark.parametrize("body", BROKEN_BODIES, ids=range(len(BROKEN_BODIES)))
    def test_broken_bodies(self, subject: DialectSubject, body: bytes) -> None:
        sent = subject.send(_request())
        target = subject.dialect.target(sent.method, sent.path)
        assert target is not None
        with pytest.raises(InvalidInput) as caught:
            subject.dialect.parse(target, body, sent.headers, sent.query)
        assert caught.value.field

    @examples
    @given(body=st.binary(max_size=200))
    def test_fuzz_bytes(self, subject: DialectSubject, body: bytes) -> None:
        self._feed(subject, body)

    @examples
    @given(document=documents())
    def test_fuzz_documents(self, subject: DialectSubject, document: Any) -> None:
        self._feed(subject, _dump(document))

    @settings(examples, max_examples=300)
    @given(data=st.data(), request=turns())
    def test_fuzz_almost_requests(
        self, subject: DialectSubject, data: st.DataObject, request: tuple[Message, ...]
    ) -> None:
        """A request with something in it that does not belong there."""
        sent = subject.send(ChatRequest(messages=request, tools=(tool("shell"),)))
        document = data.draw(mutated(json.loads(sent.body)))
        self._feed(subject, _dump(document))

    def test_ten_thousand_tools(self, subject: DialectSubject) -> None:
        offered = tuple(tool(f"tool_{number}") for number in range(10_000))
        asked = subject.parse(subject.send(_request(tools=offered)))
        assert len(asked.request.tools) == 10_000

    def test_a_schema_with_a_cycle(self, subject: DialectSubject) -> None:
        node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
        parameters = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
        asked = subject.parse(subject.send(_request(tools=(tool("walk", parameters=parameters),))))
        assert asked.request.tools[0]["function"]["parameters"] == parameters

    def test_a_schema_that_is_too_deep(self, subject: DialectSubject) -> None:
        deep: dict[str, Any] = {}
        for _ in range(200):
            deep = {"properties": deep}
        with pytest.raises(InvalidInput) as caught:
            subject.parse(subject.send(_request(tools=(tool("f", parameters=deep),))))
        assert "tools" in str(caught.value.field)

    def test_a_result_of_a_call_that_nobody_made(self, subject: DialectSubject) -> None:
        messages = (Message(role="user", content="hi"), _result("call_nobodys"))
        self._feed(subject, subject.send(ChatRequest(messages=messages)).body)

    def _feed(self, subject: DialectSubject, body: bytes) -> None:
        """Either refused as the client's fault, with the field's name, or served."""
        sent = subject.send(_request())
        target = subject.dialect.target(sent.method, sent.path)
        assert target is not None
        try:
            asked = subject.dialect.parse(target, body, sent.headers, sent.query)
        except (InvalidInput, TooLarge) as error:
            refusal: RollserveError = error
        else:
            self._serve(subject, asked)
            return
        assert refusal.field, refusal.message
        subject.dialect.error(refusal, refusal.status)

    def _serve(self, subject: DialectSubject, asked: Asked) -> None:
        _storable(asked)
        call = ToolCall(id="call_1", name="shell", arguments='{"input": "x"}')
        answer = _answer(Message(role="assistant", content="a", tool_calls=(call,)), "tool_calls")
        given_answers = [answer] * min(asked.n, 3)
        subject.dialect.whole(asked, given_answers, created_s=CREATED_S)
        subject.stream(asked, given_answers, [1], 1)


def _request(**fields: Any) -> ChatRequest:
    fields.setdefault("messages", (Message(role="user", content="hi"),))
    fields.setdefault("tools", (tool("shell"),))
    return ChatRequest(**fields)


def _answer(message: Message, reason: str = "stop", **fields: Any) -> Answered:
    return Answered(
        call_id=STREAM_ID,
        message=message,
        finish_reason=reason,
        prompt_tokens=7,
        sampled_tokens=3,
        cached_tokens=2,
        **fields,
    )


def _result(call_id: str) -> Message:
    return Message(role="tool", content="out", tool_call_id=call_id)


def _check(subject: DialectSubject, heard: Heard, answer: Answered) -> None:
    assert meaning([heard.message]) == meaning([answer.message])
    assert heard.finish_reason == subject.finish(answer.finish_reason)
    counted = (heard.prompt_tokens, heard.sampled_tokens, heard.cached_tokens)
    assert counted == (answer.prompt_tokens, answer.sampled_tokens, answer.cached_tokens)


def _storable(asked: Asked) -> None:
    """A call is recorded with its request; what can't be written must not get in."""
    packed = msgspec.msgpack.encode(asked.request)
    assert msgspec.msgpack.decode(packed, type=ChatRequest).messages == asked.request.messages


def _dump(document: Any) -> bytes:
    """With lone surrogates and odd numbers, as a careless client sends them."""
    return json.dumps(document).encode()
