"""Long prompts: rendered away from the event loop, and not at all where they can't fit."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from rollserve.errors import ContextTooLong
from rollserve.gateway import apart
from rollserve.gateway.apart import LONG_CHARS
from rollserve.gateway.rendering import Prior, Rendering, Tools
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.call import ChatRequest, Message
from rollserve.records.ids import Ids
from rollserve.records.policy import RendererSpec

from .conftest import SHELL, World

SHORT = (Message(role="user", content="hi"),)
LONG = (Message(role="user", content="word " * LONG_CHARS),)
LONG_CALL = (Message(role="user", content="hi"), Message(role="assistant", reasoning="hm " * LONG_CHARS))
MANY_TOOLS = tuple({**SHELL, "number": number} for number in range(500))


class Watched(Rendering):
    """Knows which threads have rendered."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(RendererSpec(), tokenizer)
        self.threads: list[int] = []

    def prompt(self, messages: Sequence[Message], tools: Tools) -> Ids:
        self.threads.append(threading.get_ident())
        return super().prompt(messages, tools)

    def extend(self, prior: Prior, new: Sequence[Message], tools: Tools) -> list[int] | None:
        self.threads.append(threading.get_ident())
        return super().extend(prior, new, tools)


@pytest.fixture
def watched(tiny: TextTokenizer) -> Watched:
    return Watched(tiny)


@pytest.mark.parametrize(
    ("messages", "tools", "aside"),
    [
        (SHORT, (), False),
        (SHORT, (SHELL,), False),
        (LONG, (), True),
        (LONG_CALL, (), True),
        (SHORT, MANY_TOOLS, True),
    ],
)
async def test_only_long_prompts_leave_the_loop(
    watched: Watched,
    qwen3: Rendering,
    messages: tuple[Message, ...],
    tools: tuple[dict[str, object], ...],
    aside: bool,
) -> None:
    assert await apart.render(watched, messages, tools, None) == qwen3.render(messages, tools)
    (thread,) = watched.threads
    assert (thread != threading.get_ident()) == aside


async def test_what_a_long_turn_adds_is_rendered_apart(watched: Watched, tiny: TextTokenizer) -> None:
    prompt, sampled = watched.render(SHORT, ()), tiny.encode("yes<|im_end|>")
    prior = Prior(
        prompt_ids=prompt,
        sampled_ids=sampled,
        context=lambda: [*prompt, *sampled],
        conversation=(Message(role="assistant", content="yes"),),
    )
    for new in (SHORT, LONG):
        watched.threads.clear()
        assert await apart.extend(watched, prior, new, (), None) == watched.extend(prior, new, ())
        assert (watched.threads[0] != threading.get_ident()) == (new is LONG)


async def test_what_can_never_fit_is_not_rendered(watched: Watched, tiny: TextTokenizer) -> None:
    assert tiny.longest_token is not None
    room = len(LONG[0].content) // tiny.longest_token
    with pytest.raises(ContextTooLong, match="are more") as caught:
        await apart.render(watched, LONG, (), room)
    assert (caught.value.field, caught.value.context_tokens, caught.value.prompt_tokens) == (
        "messages",
        room,
        None,
    )
    assert watched.threads == []
    assert len(await apart.render(watched, LONG, (), room + 1)) > room + 1  # the caller's to refuse


async def test_a_session_goes_on_after_it(world: World) -> None:
    world.view(context_tokens=64)
    session = await world.open()
    hopeless = ChatRequest(messages=(Message(role="user", content="x" * 1_000_000),))
    with pytest.raises(ContextTooLong, match="1000000 characters are more"):
        await session.call(hopeless)
    with pytest.raises(ContextTooLong, match="are more"):
        await session.conversation_state.count(hopeless)
    assert world.pool.requests == []
    await session.call(ChatRequest(messages=SHORT))
    long = ChatRequest(messages=(Message(role="user", content="ab " * 100),))
    assert await session.conversation_state.count(long) > 64  # counted, where it can be


def test_long_text_has_the_ids_of_its_parts(tiny: TextTokenizer) -> None:
    text = "The answer is in this file.\n" * 400
    assert tiny.encode(text) == tiny.encode("The answer is in this file.\n") * 400
