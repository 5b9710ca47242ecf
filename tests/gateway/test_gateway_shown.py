"""Images of agents in the worker: a task's, and those that tools attach, to an engine that sees and to ones
that do not."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_image
from tests.gateway.conftest import World
from tests.gateway.test_gateway_chat import Room

from rollserve.agent.base import AgentResult
from rollserve.agent.tool_agent import ToolAgent, ToolAgentOptions
from rollserve.agent.toolbox import BuiltToolbox
from rollserve.errors import AgentFailure, InvalidInput, UnknownName
from rollserve.gateway.images import ImageBounds
from rollserve.gateway.sessions import GatewaySession
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.call import Message
from rollserve.records.image import Image, digest_of
from rollserve.rollouts.judging import Judges
from rollserve.sandbox.tools import Attachment, ToolResult, function_schema
from rollserve.testing.fakes import ScriptedModel, some_episode, some_task
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_chat import ChatApp
from rollserve.testing.scripted_server import serving

DRAW = '<tool_call>\n{"name": "draw", "arguments": {}}\n</tool_call>'
RED, BLUE = b"\x89PNG red \xfb\xff", b"\x89PNG blue"
FAR = "https://pictures.invalid/a.png"


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


class Draws:
    """A tool that makes a figure each time, as ``python`` does."""

    schema = function_schema("draw", "Draw.", {"type": "object", "properties": {}})

    def __init__(self, *attached: Attachment) -> None:
        self._attached = attached

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(text="[figure: /tmp/figures/1.png]", attachments=self._attached)

    async def close(self) -> None:
        """It holds nothing."""


BLUE_FIGURE = Attachment(media_type="image/png", base64=base64.b64encode(BLUE).decode())


@pytest.fixture
async def enter(tiny: TextTokenizer) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def make(form: Any = "vllm", *, sees: bool = True, **settings: Any) -> Room:
            app = ChatApp(ScriptedEngine(label=None), form)
            app.takes_images = sees
            room = Room(app, await stack.enter_async_context(serving(app)), tiny, **settings)
            stack.push_async_callback(room.service.close)
            return room

        yield make


async def play(
    session: GatewaySession, *attached: Attachment, log: list[str] | None = None, **options: Any
) -> AgentResult:
    """The built-in agent; ``pictures`` are the task's."""
    task = some_task(instruction="What is  this?", pictures=options.pop("pictures", []))
    tools = BuiltToolbox({"draw": Draws(*(attached or (BLUE_FIGURE,)))}, {})
    episode = some_episode(ScriptedModel(), tools, task=task, log=log)
    return await ToolAgent(ToolAgentOptions(**options)).run(replace(episode, model=session.model))


def seen(message: Any) -> list[Any]:
    """The parts of a message as the engine was sent them: texts, and addresses in a list."""
    if isinstance(message.content, str):
        return [message.content]
    return [part.text or [part.image_url.url] for part in message.content]


@pytest.mark.parametrize("form", ["vllm", "text"])
async def test_a_tasks_pictures_and_a_tools_figures_are_sent(form: str, enter: Any) -> None:
    room = await enter(form)
    room.says(f"look\n{DRAW}", DRAW, "a cat")
    pictures = [{"url": FAR}, {"url": data_url(RED), "at": 8, "detail": "low"}]
    result = await play(await room.open(), pictures=pictures)
    assert result.answer == "a cat"
    user, _, told, _, again = room.app.asked[-1].messages
    assert seen(user) == ["What is ", [data_url(RED)], " this?", [FAR]]
    assert seen(told) == seen(again) == ["[figure: /tmp/figures/1.png]", [data_url(BLUE)]]
    one, two, three = room.calls
    assert (two.parent, three.parent) == (one.id, two.id)
    assert [image.detail for image in one.messages[0].images] == ["low", None]
    assert two.messages[-1].images[0].at == len("[figure: /tmp/figures/1.png]")
    assert room.segment.artifacts == [(f"images/{digest_of(RED)}", RED), (f"images/{digest_of(BLUE)}", BLUE)]
    if form == "vllm":
        (sample,) = room.samples()
        assert sample.exact
        assert [(each.image.key, each.call_id, each.exact) for each in sample.images] == [
            (digest_of(RED), one.id, True),
            (FAR, one.id, True),
            (digest_of(BLUE), two.id, True),
            (digest_of(BLUE), three.id, True),
        ]


async def test_a_model_that_takes_none_reads_where_the_figure_is(world: World) -> None:
    world.pool.script = world.says(DRAW, "done")
    assert (await play(await world.open())).answer == "done"
    told = world.segments[0].calls[1].messages[-1]
    assert (told.content, told.images) == ("[figure: /tmp/figures/1.png]", ())
    assert world.segments[0].artifacts == []


@pytest.mark.parametrize("sends", ["ids", "chat"])
async def test_a_task_with_pictures_ends_before_such_a_model_is_asked(
    sends: str, world: World, enter: Any
) -> None:
    room = await enter(sees=False)
    session = await (world if sends == "ids" else room).open()
    with pytest.raises(AgentFailure, match="takes no images"):
        await play(session, pictures=[{"url": data_url(RED)}])
    assert world.pool.requests == []
    assert room.app.asked == []


async def test_what_can_not_be_shown_is_named_all_the_same(enter: Any) -> None:
    room = await enter(images=ImageBounds(image_bytes=len(BLUE)))
    room.says(DRAW, "done")
    broken = Attachment(media_type="image/png", base64="!")
    sound = Attachment(media_type="audio/wav", base64="UklGRg==")
    large = Attachment(media_type="image/png", base64=base64.b64encode(BLUE + b"!").decode())
    log: list[str] = []
    await play(await room.open(), broken, sound, large, BLUE_FIGURE, log=log)
    assert seen(room.app.asked[1].messages[2]) == ["[figure: /tmp/figures/1.png]", [data_url(BLUE)]]
    assert ["not base64" in log[0], "the most is" in log[1], len(log)] == [True, True, 2]


async def test_a_conversation_holds_so_many_images(enter: Any) -> None:
    room = await enter()
    room.says(DRAW, DRAW, DRAW, "done")
    await play(await room.open(), BLUE_FIGURE, BLUE_FIGURE, pictures=[{"url": FAR}], max_images=4)
    messages = room.app.asked[-1].messages
    assert [len(seen(message)) for message in messages if message.role == "tool"] == [3, 2, 1]


async def test_an_image_is_shown_before_it_is_sent(enter: Any) -> None:
    room = await enter()
    room.says("one", "two")
    session = await room.open()
    unknown = Image(digest=digest_of(RED), media_type="image/png", size_bytes=len(RED))
    with pytest.raises(InvalidInput, match="was not shown") as caught:
        await session.model.chat([Message(role="user", content="a", images=(unknown,))])
    assert caught.value.field == "messages.0.images.0"
    assert room.app.asked == []
    image = await session.model.show(RED)
    assert image == unknown
    await session.model.chat([Message(role="user", content="a", images=(image,))])
    assert seen(room.app.asked[0].messages[0]) == [[data_url(RED)], "a"]


async def test_images_stay_where_they_stand_in_text_that_is_none(enter: Any) -> None:
    """Halves of a pair make one character, and a lone one another."""
    room = await enter()
    session = await room.open()
    image = await session.model.show(RED)
    assert image is not None
    content, images = "\ud83d\ude00\ud83d a", (replace_image(image, at=3),)
    await session.model.chat([Message(role="user", content=content, images=images)])
    assert seen(room.app.asked[0].messages[0]) == ["😀\ufffd", [data_url(RED)], " a"]


@pytest.mark.parametrize(
    ("data", "media_type", "field", "why"),
    [
        (b"", "image/png", "media_type", "hold something"),
        (b"x", "text/plain", "media_type", "only images"),
        ("data:image/png;base64,!", "image/png", "data", "not base64"),
        ("ftp://a.example/b.png", "image/png", "data", "data:, http: or https:"),
        (b"0123456789", "image/png", "data", "the most is 8"),
    ],
)
async def test_what_is_no_image_is_refused(
    data: bytes | str, media_type: str, field: str, why: str, enter: Any
) -> None:
    session = await (await enter(images=ImageBounds(image_bytes=8))).open()
    with pytest.raises(InvalidInput, match=why) as caught:
        await session.model.show(data, media_type)
    assert caught.value.field == field


async def test_a_session_keeps_so_many_bytes_each_image_once(enter: Any) -> None:
    session = await (await enter(images=ImageBounds(session_bytes=10))).open()
    for data in (b"012345", b"012345", b"abcd"):
        assert await session.model.show(data) is not None
    with pytest.raises(InvalidInput, match="of this session"):
        await session.model.show(b"!")
    assert await session.model.show(FAR) is not None


async def test_who_is_asked_says_whether_it_sees(enter: Any) -> None:
    room = await enter()
    session = await room.open(run={"routes": {"judge": {"policy": "p"}}})
    assert await session.model.show(RED, model="judge") is not None
    assert await Judges(session).show(RED, model="judge") is not None
    with pytest.raises(UnknownName):
        await session.model.show(RED, model="nobody")
