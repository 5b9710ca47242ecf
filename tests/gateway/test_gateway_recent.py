"""Prompts that were rendered before, and those alone."""

from __future__ import annotations

from typing import Any

import pytest

from rollserve.gateway.recent import RecentIds
from rollserve.gateway.rendering import Rendering
from rollserve.gateway.tokens import TextTokenizer, load_tokenizer
from rollserve.records.call import Message, pack_ids
from rollserve.records.ids import Ids
from rollserve.records.policy import RendererSpec

from .conftest import SHELL


def test_what_was_not_wanted_for_longest_goes_first() -> None:
    recent = RecentIds(6)
    recent.put("a", [1, 2, 3])
    recent.put("b", [4, 5])
    assert known(recent, "a") == [[1, 2, 3]]
    recent.put("c", [6, 7])
    assert known(recent, "abc") == [[1, 2, 3], None, [6, 7]]
    recent.put("a", [9])
    recent.put("d", [1, 2, 3])
    assert known(recent, "acd") == [[9], [6, 7], [1, 2, 3]]
    recent.put("e", [0] * 7)
    assert known(recent, "ed") == [None, [1, 2, 3]]


def known(recent: RecentIds, keys: str) -> list[list[int] | None]:
    return [None if (found := recent.get(key)) is None else found.list for key in keys]


def test_ids_are_the_askers_own() -> None:
    recent = RecentIds(6)
    given = [1, 2]
    recent.put("a", given)
    given.append(3)
    (found,) = known(recent, "a")
    assert found == [1, 2]
    found.append(4)
    assert known(recent, "a") == [[1, 2]]


def test_ids_that_had_their_text_have_it_again() -> None:
    recent = RecentIds(6)
    recent.put("a", Ids([1, 20]))
    found = recent.get("a")
    assert found is not None
    assert (found.text, found.packed, found.list) == (b"1,20", pack_ids([1, 20]), [1, 20])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[Rendering, list[str]]:
    """A rendering, and the texts that were really encoded."""
    tokenizer, texts = load_tokenizer("tiny"), list[str]()
    encode = TextTokenizer._encode

    def counting(self: TextTokenizer, text: str) -> list[int]:
        texts.append(text)
        return encode(self, text)

    monkeypatch.setattr(TextTokenizer, "_encode", counting)
    return Rendering(RendererSpec(), tokenizer, "keep"), texts


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([Message(role="user", content="words " * 20 + "other")], (SHELL,)),
        ([Message(role="user", content="words " * 20)], ()),
        ([Message(role="user", content="words " * 20, name="x")], (SHELL,)),
        ([Message(role="system", content="words " * 20)], (SHELL,)),
    ],
)
def test_a_prompt_is_rendered_once(
    counted: tuple[Rendering, list[str]], messages: list[Message], tools: tuple[dict[str, Any], ...]
) -> None:
    """And another is not taken for it."""
    rendering, texts = counted
    first = [Message(role="user", content="words " * 20)]
    ids = rendering.render(first, (SHELL,))
    texts.clear()
    assert rendering.render(first, (dict(SHELL),)) == ids
    assert texts == []
    other = rendering.render(messages, tools)
    assert other == Rendering(RendererSpec(), load_tokenizer("tiny"), "keep").render(messages, tools)
    assert (other == ids) == (messages[0].name == "x")


def test_instructions_that_many_prompts_share_are_encoded_once(
    counted: tuple[Rendering, list[str]],
) -> None:
    rendering, texts = counted
    system = Message(role="system", content="be good, " * 50)
    for text in ("one", "two"):
        texts.clear()
        rendering.render([system, Message(role="user", content=text)], (SHELL,))
    assert sum(map(len, texts)) < 100


def test_what_can_not_be_a_key_is_rendered_all_the_same() -> None:
    rendering = Rendering(RendererSpec(), load_tokenizer("tiny"), "keep")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}}
    assert rendering.render([Message(role="user", content="hi")], (tool,))
