"""Text of an answer while it is sampled: the same, however many tokens come at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollserve.dialect.base import Piece
from rollserve.gateway.rendering import Rendering
from rollserve.gateway.streaming import AnswerText

SAID = st.lists(
    st.sampled_from(
        [
            "hi ",
            "über 🙂 日本",
            "\n",
            "  ",
            "<think>",
            "</think>",
            "<tool_call>",
            "<|im_end|>",
            "stop here",
            "👩\u200d🚀",
        ]
    ),
    max_size=8,
).map("".join)


def told(rendering: Rendering, ids: list[int], cuts: list[int], stops: tuple[str, ...]) -> tuple[object, ...]:
    """What is let out of each kind, and how it ended."""
    said: list[Piece] = []
    text = AnswerText(rendering, [], False, stops, said.append)
    for start, end in pairwise([0, *sorted(cuts), len(ids)]):
        if text.take(ids[start:end]):
            break
    kinds = ["".join(piece.text for piece in said if piece.kind == kind) for kind in ("reasoning", "content")]
    return (*kinds, text.stopped_by, text.told, text.kept if text.stopped_by else None)


@pytest.mark.parametrize("stops", [(), ("stop",)])
@pytest.mark.parametrize("open_thoughts", [True, False])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(said=SAID, data=st.data())
def test_tokens_that_come_together_say_what_they_say_alone(
    qwen3: Rendering, said: str, data: st.DataObject, stops: tuple[str, ...], open_thoughts: bool
) -> None:
    rendering = Rendering.__new__(Rendering)
    rendering.__dict__.update(qwen3.__dict__)
    rendering.streams_thinking = open_thoughts
    ids = qwen3.tokenizer.encode(said)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    assert told(rendering, ids, cuts, stops) == told(rendering, ids, list(range(1, len(ids))), stops)


def test_half_a_character_waits_for_its_end(qwen3: Rendering) -> None:
    said: list[Piece] = []
    ids = qwen3.tokenizer.encode("so 🙂 it is")
    text = AnswerText(qwen3, [], False, (), said.append)
    half = next(at for at in range(1, len(ids)) if "\ufffd" in qwen3.tokenizer.decode(ids[:at]))
    text.take(ids[:half])
    assert "\ufffd" not in "".join(piece.text for piece in said)
    text.take(ids[half:])
    assert "".join(piece.text for piece in said) == "so 🙂 it is"
