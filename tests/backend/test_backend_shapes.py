"""Bodies as real servers send them: vLLM 0.32's generate route, and the dialects of completions."""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.backend.assembly import Assembly, Piece, join_spans
from rollserve.backend.base import GenerateRequest, LabelSpan
from rollserve.backend.chat import ChatFormat
from rollserve.backend.http import Lines, parse_retry_after, whole_events
from rollserve.backend.openai import CompletionsFormat
from rollserve.backend.route import Format
from rollserve.backend.vllm import GenerateFormat
from rollserve.errors import BackendError, BackendUnavailable
from rollserve.records.call import SamplingParams

VLLM_WHOLE: dict[str, Any] = {
    "request_id": "generate-tokens-42",
    "model": "tiny",
    "created": 1790000000,
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    "prompt_token_ids": [11, 12, 13],
    "prompt_logprobs": None,
    "metrics": None,
    "output_mode": "tokens",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [374, 9, 8, 2],
            "logprobs": {
                "content": [
                    {"token_id": 374, "logprob": -0.5, "rank": 1, "top_logprobs": []},
                    {"token_id": 9, "logprob": -1.25, "rank": 3, "top_logprobs": []},
                    {"token_id": 8, "logprob": 0.0, "rank": 1, "top_logprobs": []},
                    {"token_id": 2, "logprob": -0.125, "rank": 1, "top_logprobs": []},
                ]
            },
            "weight_versions": [
                {"version": "step-1", "start": 0, "end": 3},
                {"version": "step-2", "start": 3, "end": 4},
            ],
            "routed_experts": base64.b64encode(b"\x93NUMPY-bytes").decode(),
            "sampling_mask": None,
        }
    ],
}


def read(body: dict[str, Any]) -> Any:
    assembly = Assembly()
    assembly.add(GenerateFormat().decode(json.dumps(body).encode()))
    return assembly.finish()


def test_vllm_whole_answer() -> None:
    made = read(VLLM_WHOLE)
    assert made.token_ids == [374, 9, 8, 2]
    assert made.logprobs == [-0.5, -1.25, 0.0, -0.125]
    assert made.finish_reason == "stop"
    assert made.prompt_ids == [11, 12, 13]
    assert made.labels == (LabelSpan(0, 3, "step-1"), LabelSpan(3, 4, "step-2"))
    assert made.extras == {"routed_experts": b"\x93NUMPY-bytes"}


def event(ids: list[int], start: int, finish: str | None, prompt: list[int] | None = None) -> bytes:
    choice = {
        "index": 0,
        "finish_reason": finish,
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": one, "logprob": -1.0, "rank": 1} for one in ids]},
        "weight_versions": [{"version": "v", "start": start, "end": start + len(ids)}],
    }
    return json.dumps({"request_id": "r", "choices": [choice], "prompt_token_ids": prompt}).encode()


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_vllm_stream(absolute: bool, together: int) -> None:
    """However many of its events come at once."""
    read, assembly, handed = GenerateFormat().reader(), Assembly(), []
    events = [
        event([1, 2], 0, None, prompt=[7]),
        event([3], 2 if absolute else 0, None),
        event([4, 5], 3 if absolute else 0, "length"),
        b'{"request_id":"r","choices":[],"usage":{"prompt_tokens":1}}',
    ]
    for at in range(0, len(events), together):
        before = len(assembly)
        for piece in read(events[at : at + together]):
            assembly.add(piece)
        assembly.hand_over(lambda ids, logprobs: handed.extend(ids), before)
    made = assembly.finish()
    assert made.token_ids == handed == [1, 2, 3, 4, 5]
    assert made.labels == (LabelSpan(0, 5, "v"),)
    assert made.prompt_ids == [7]
    assert made.finish_reason == "length"


def test_aborted_by_a_pause_keeps_its_tokens() -> None:
    body = json.loads(json.dumps(VLLM_WHOLE))
    body["choices"][0]["finish_reason"] = "abort"
    made = read(body)
    assert made.finish_reason == "abort"
    assert len(made.token_ids) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": None}, "4 sampled ids came with 0 logprobs"),
        ({"finish_reason": "error"}, "ended with 'error'"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 3}]}, "cover 3 of 4"),
        ({"token_ids": [5, 2**31, 6, 7]}, "can be no token's"),
        ({"token_ids": [5, -1, 6, 7]}, "can be no token's"),
        (
            {
                "weight_versions": [
                    {"version": "a", "start": 0, "end": 1},
                    {"version": "b", "start": 2, "end": 4},
                ]
            },
            "leave out",
        ),
    ],
)
def test_missing_evidence_is_an_error(change: dict[str, Any], says: str) -> None:
    body = json.loads(json.dumps(VLLM_WHOLE))
    body["choices"][0].update(change)
    with pytest.raises(BackendError, match=says):
        read(body)


def test_the_sentinel_is_no_logprob() -> None:
    body = json.loads(json.dumps(VLLM_WHOLE))
    body["choices"][0]["logprobs"]["content"][1]["logprob"] = -9999.0
    with pytest.raises(BackendError, match="without its logprob"):
        read(body)


@pytest.mark.parametrize("versions", [None, [{"version": None, "start": 0, "end": 4}]])
def test_no_versions(versions: object) -> None:
    body = json.loads(json.dumps(VLLM_WHOLE))
    body["choices"][0]["weight_versions"] = versions
    assert read(body).labels is None


@pytest.mark.parametrize("format", [GenerateFormat(), CompletionsFormat(), ChatFormat(tokens=True)])
def test_an_error_in_the_stream(format: Format) -> None:
    with pytest.raises(BackendError, match="gave up: out of memory"):
        format.reader()([b'{"error": {"message": "out of memory", "code": 500}}'])
    with pytest.raises(BackendError, match=r"the answer is not a .*: <html>"):
        format.reader()([b"<html>"])


def test_more_tokens_than_were_asked_for() -> None:
    assembly = Assembly(max_tokens=3)
    assembly.add(Piece([5, 6, 7], [-1.0] * 3))
    with pytest.raises(BackendError, match="more than the 3 tokens"):
        assembly.add(Piece([8], [-1.0]))


def test_an_answer_that_stops_short() -> None:
    assembly = Assembly()
    assembly.add(Piece([1], [-1.0]))
    with pytest.raises(BackendUnavailable, match="ended before"):
        assembly.finish()


def test_vllm_request() -> None:
    request = GenerateRequest(
        request_id="r",
        model="tiny",
        token_ids=[1, 2],
        sampling=SamplingParams(temperature=0.5, max_tokens=9, seed=3, stop_token_ids=(2,)),
        cache_salt="v3",
    )
    assert json.loads(GenerateFormat().encode(request, stream=True)) == {
        "request_id": "r",
        "model": "tiny",
        "token_ids": [1, 2],
        "sampling_params": {
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": 9,
            "logprobs": 0,
            "detokenize": False,
            "seed": 3,
            "stop_token_ids": [2],
        },
        "return_token_ids": True,
        "stream": True,
        "cache_salt": "v3",
    }


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0], "tokens": ["a", "b"]}},
        {"response_token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}},
        {"logprobs": {"token_logprobs": [-1.0, -2.0], "tokens": ["token_id:5", "token_id:6"]}},
        {"logprobs": {"content": [{"id": 5, "logprob": -1.0}, {"id": 6, "logprob": -2.0}]}},
    ],
    ids=["vllm", "sglang", "names", "llama.cpp"],
)
def test_completions_dialects(choice: dict[str, Any]) -> None:
    body = json.dumps({"id": "x", "choices": [{"index": 0, "finish_reason": "stop", "text": "ab", **choice}]})
    piece = CompletionsFormat().decode(body.encode())
    assert piece.token_ids == [5, 6]
    assert piece.logprobs == [-1.0, -2.0]
    assert piece.finish_reason == "stop"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_however_they_are_cut(size: int) -> None:
    text = b"data: one\n\ndata: t\xc3\xa4o\r\n\r\n: ping\ndata: [DONE]\n\ntail"
    lines, found = Lines(), []
    for start in range(0, len(text), size):
        found += lines.feed(text[start : start + size])
    assert found == [b"data: one", b"", b"data: t\xc3\xa4o", b"", b": ping", b"data: [DONE]", b""]


@pytest.mark.parametrize(
    ("chunk", "payloads"),
    [
        (b"data: one\n\n", [b"one"]),
        (b"data: one\n\ndata: two\n\ndata: [DONE] \n\n", [b"one", b"two", b"[DONE]"]),
        (b"data: one\n\ndata: tw", None),
        (b"ne\n\ndata: two\n\n", None),
        (b"data: one\n\n: ping\n\n", None),
        (b"data: one\ndata: two\n\n", None),
        (b"event: x\ndata: one\n\n", None),
        (b"data: one\n\n\n\ndata: two\n\n", None),
        (b"data: one\r\n\r\n", None),
        (b"", None),
    ],
)
def test_chunks_of_whole_events_are_cut_at_once(chunk: bytes, payloads: list[bytes] | None) -> None:
    """And those alone."""
    assert whole_events(chunk) == payloads


class Event(NamedTuple):
    """Of a stream: ``spans`` as the server counts them, or none."""

    ids: list[int]
    label: str | None
    more: dict[str, Any]


EVENTS = st.lists(
    st.builds(
        Event,
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from(["a", "b", None]),
        st.sampled_from(
            [{}, {}, {}, {"routed_experts": "AAAA"}, {"logprobs": None}, {"finish_reason": "stop"}]
        ),
    ),
    min_size=1,
    max_size=12,
)


def spell(events: list[Event], absolute: bool) -> list[bytes]:
    found, at = list[bytes](), 0
    for one in events:
        start = at if absolute else 0
        span = {"version": one.label, "start": start, "end": start + len(one.ids)}
        choice = json.loads(event(one.ids, 0, None))["choices"][0] | {"weight_versions": [span]} | one.more
        found.append(json.dumps({"choices": [choice]}).encode())
        at += len(one.ids)
    return found


def outcome(bodies: list[bytes], together: int) -> object:
    assembly, read = Assembly(), GenerateFormat().reader()
    try:
        for at in range(0, len(bodies), together):
            for piece in read(bodies[at : at + together]):
                assembly.add(piece)
        return assembly.aborted()
    except BackendError as error:
        return error.message


@given(events=EVENTS, absolute=st.booleans(), together=st.integers(2, 12))
def test_events_that_come_together_are_those_that_come_alone(
    events: list[Event], absolute: bool, together: int
) -> None:
    bodies = spell(events, absolute)
    one, other = outcome(bodies, 1), outcome(bodies, together)
    assert one == other or (isinstance(one, str) and isinstance(other, str))


def test_an_event_that_can_not_be_read_is_told_by_itself() -> None:
    read = GenerateFormat().reader()
    with pytest.raises(BackendError, match="gave up: out of memory"):
        read([event([1], 0, None), b'{"error": {"message": "out of memory"}}'])


def test_join_spans_when_events_repeat_all() -> None:
    spans = join_spans([], [(0, 2, "a")], 0, 2)
    spans = join_spans(spans, [(0, 2, "a"), (2, 3, "b")], 2, 3)
    assert spans == [(0, 2, "a"), (2, 3, "b")]


def test_retry_after() -> None:
    assert parse_retry_after("3", 0.0) == 3.0
    assert parse_retry_after("0.5", 0.0) == 0.5
    assert parse_retry_after("Thu, 01 Jan 1970 00:01:40 GMT", 40.0) == 60.0
    assert parse_retry_after("Thu, 01 Jan 1970 00:01:40 GMT", 400.0) == 0.0
    assert parse_retry_after("soon", 0.0) is None
