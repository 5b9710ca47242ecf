"""Images in messages: with the providers' own clients, to an engine that sees and to ones that do not."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.gateway.conftest import World
from tests.gateway.official import TALKS, talking
from tests.gateway.serving import of_session, serving
from tests.gateway.test_gateway_chat import Room

from rollserve.errors import InvalidInput
from rollserve.gateway.images import ImageBounds, placed
from rollserve.gateway.proof import check_sample
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.call import ChatRequest, Message, unpack_ids
from rollserve.records.image import Image, Picture, digest_of
from rollserve.records.run import RunSpec
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_chat import ChatApp
from rollserve.testing.scripted_images import IMAGE_TOKEN
from rollserve.testing.scripted_server import serving as engine_serving
from rollserve.wire import from_wire, to_wire

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
RED, BLUE = b"\x89PNG red \xfb\xff", b"\xff\xd8 blue"
FAR = "https://pictures.invalid/a.png"
PLACES = {
    "chat": "messages.0.content.1",
    "responses": "input.0.content.1",
    "messages": "messages.0.content.1",
    "generate_content": "contents.0.parts.1.inlineData",
}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part(dialect: str, data: bytes | str, media_type: str = "image/png") -> dict[str, Any]:
    """An image as the client of a provider sends it: bytes, or an address."""
    url = data if isinstance(data, str) else f"data:{media_type};base64,{b64(data)}"
    if dialect == "chat":
        return {"type": "image_url", "image_url": {"url": url}}
    if dialect == "responses":
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    if dialect == "messages":
        if isinstance(data, str):
            return {"type": "image", "source": {"type": "url", "url": data}}
        return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": b64(data)}}
    if isinstance(data, str):
        return {"file_data": {"file_uri": data, "mime_type": media_type}}
    return {"inline_data": {"data": data, "mime_type": media_type}}


def text(dialect: str, said: str) -> dict[str, Any]:
    kinds = {"chat": "text", "responses": "input_text", "messages": "text"}
    return {"type": kinds[dialect], "text": said} if dialect in kinds else {"text": said}


def show(talk: Any, *parts: Any) -> None:
    """The user says and shows, in one message."""
    named = [text(talk.name, each) if isinstance(each, str) else each for each in parts]
    if talk.name == "generate_content":
        talk.contents = [*talk.contents[:-1], {"role": "user", "parts": named}]
    else:
        talk.messages[-1] = {"role": "user", "content": named}


def show_result(talk: Any, shown: Any) -> None:
    """The results just given show an image, too."""
    if talk.name == "generate_content":
        (answer,) = talk.contents[-1]["parts"]
        answer["function_response"]["parts"] = [shown]
        return
    last = talk.messages[-1]
    holder, field = {
        "chat": (last, "content"),
        "responses": (last, "output"),
        "messages": (last["content"][0] if talk.name == "messages" else None, "content"),
    }[talk.name]
    holder[field] = [text(talk.name, holder[field]), shown]


@pytest.fixture
async def enter(tiny: TextTokenizer) -> AsyncIterator[Callable[..., Any]]:
    """``await enter()``: a room whose engine sees."""
    async with AsyncExitStack() as stack:

        async def make(form: Any = "vllm", *, sees: bool = True, **settings: Any) -> Room:
            app = ChatApp(ScriptedEngine(label=None), form)
            app.takes_images = sees
            room = Room(app, await stack.enter_async_context(engine_serving(app)), tiny, **settings)
            await stack.enter_async_context(serving(room))
            return room

        yield make


async def talk_of(stack: AsyncExitStack, room: Any, name: str) -> Any:
    talk = await stack.enter_async_context(talking(name, await room.open()))
    talk.name = name
    return talk


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", list(TALKS))
async def test_images_reach_an_engine_that_sees(name: str, stream: bool, enter: Any) -> None:
    room = await enter()
    room.says(f"look\n{CALL}", "done")
    async with AsyncExitStack() as stack:
        talk = await talk_of(stack, room, name)
        show(talk, "a ", part(name, RED), " b ", part(name, FAR))
        first = await talk.say(stream=stream)
        assert first.calls == [("shell", {"command": "ls"})]
        talk.results("seen")
        show_result(talk, part(name, BLUE, "image/jpeg"))
        assert (await talk.say(stream=stream)).text == "done"
    sent = room.app.asked[1].messages
    urls = [[each.image_url.url for each in m.content if each.image_url] for m in (sent[0], sent[2])]
    assert urls == [[f"data:image/png;base64,{b64(RED)}", FAR], [f"data:image/jpeg;base64,{b64(BLUE)}"]]
    one, two = room.calls
    assert (two.parent, two.broke, two.inexact) == (one.id, None, None)
    assert all(drift.cause == "arguments_reserialized" for drift in two.drift)
    assert room.segment.artifacts == [(f"images/{digest_of(RED)}", RED), (f"images/{digest_of(BLUE)}", BLUE)]
    (sample,) = room.samples()
    assert sample.exact
    token = room.tokenizer.token_id(IMAGE_TOKEN)
    assert [(each.image.digest, each.exact, each.call_id) for each in sample.images] == [
        (digest_of(RED), True, one.id),
        (digest_of(FAR.encode()), True, one.id),
        (digest_of(BLUE), True, two.id),
    ]
    for each in sample.images:
        assert each.end > each.start
        assert set(sample.ids[each.start : each.end].tolist()) == {token}
    assert int((sample.ids == token).sum()) == sum(each.end - each.start for each in sample.images)
    assert check_sample(sample, {call.id: call for call in room.calls}, room.tokenizer, 0).findings == []
    for form in ("json", "msgpack"):
        assert from_wire(to_wire(sample, form)).images == sample.images


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", list(TALKS))
async def test_a_model_that_is_sent_ids_takes_none(name: str, stream: bool, world: World) -> None:
    async with serving(world), AsyncExitStack() as stack:
        talk = await talk_of(stack, world, name)
        show(talk, "a ", part(name, RED))
        with pytest.raises(talk.refused) as caught:
            await talk.say(stream=stream)
        if hasattr(talk, "count"):
            with pytest.raises(talk.refused, match="takes no images"):
                await talk.count()
    said = f"{caught.value} {getattr(caught.value, 'param', '')}"  # OpenAI's has a field for the place
    assert "policy 'p' takes no images: it is sent token ids" in said
    assert "'chat' or 'text'" in said
    assert PLACES[name] in said
    assert world.pool.requests == []
    assert world.segments[0].artifacts == []


@pytest.mark.parametrize("form", ["vllm", "text"])
async def test_a_backend_that_was_not_said_to_see_gets_none(form: str, enter: Any) -> None:
    room = await enter(form, sees=False)
    session = await room.open()
    async with of_session(session) as client:
        body = {"messages": [{"role": "user", "content": [part("chat", RED)]}]}
        answer = await client.post("/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.0.content.0"
    assert "does not accept them" in answer.json()["error"]["message"]
    assert room.app.asked == []


async def test_it_is_refused_at_once_also_while_the_policy_waits(world: World) -> None:
    world.view(paused=True)
    session = await world.open()
    image = Image(digest=digest_of(RED), media_type="image/png", size_bytes=len(RED))
    request = ChatRequest(
        messages=(Message(role="user", images=(image,)),),
        pictures={image.digest: Picture(place="messages.0.content.0", data=RED)},
    )
    with pytest.raises(InvalidInput, match="takes no images") as caught:
        await session.call(request)
    assert caught.value.field == "messages.0.content.0"


async def test_a_service_of_text_says_what_it_saw(enter: Any) -> None:
    room = await enter("text")
    room.says("a cat")
    async with AsyncExitStack() as stack:
        talk = await talk_of(stack, room, "chat")
        show(talk, "what is ", part("chat", RED), "?")
        assert (await talk.say()).text == "a cat"
    (call,) = room.calls
    assert (call.inexact, call.images) == ("no_tokens", ())
    (sample,) = room.samples(RunSpec(policy="p", on_inexact="text"))
    assert (sample.exact, sample.cause) == (False, "no_tokens")
    assert f"what is [image image/png {digest_of(RED)}]?" in (sample.text or "")
    ((image, start, end),) = [(each.image.digest, each.start, each.end) for each in sample.images]
    assert (image, start, end) == (digest_of(RED), 0, 0)


async def test_storage_grows_by_what_is_new(enter: Any) -> None:
    """Each turn sends all images again, one of them new."""
    room = await enter()
    room.says(*["ok"] * 6)
    pictures = [b"\x89PNG" + bytes([number]) * 1000 for number in range(5)]
    async with AsyncExitStack() as stack:
        talk = await talk_of(stack, room, "messages")
        talk.messages = []
        for data in [*pictures, pictures[0]]:
            talk.messages.append({"role": "user", "content": [part("messages", data)]})
            await talk.say()
    assert [data for _, data in room.segment.artifacts] == pictures
    assert [len(call.messages) for call in room.calls] == [1] * 6
    assert len(room.samples()) == 1


async def test_another_image_is_another_history(enter: Any) -> None:
    room = await enter()
    room.says(*["ok"] * 3)
    async with AsyncExitStack() as stack:
        talk = await talk_of(stack, room, "chat")
        for data in (RED, BLUE, RED):
            show(talk, "what is this?", part("chat", data))
            await talk.say()
            talk.messages = talk.messages[:1]
    one, two, three = room.calls
    assert [call.parent for call in (one, two, three)] == [None] * 3
    assert one.messages == three.messages != two.messages
    assert unpack_ids(one.prompt_ids).tolist() == unpack_ids(three.prompt_ids).tolist()


async def test_an_answer_is_gone_on_from_by_name(enter: Any) -> None:
    room = await enter()
    room.says("one", "two", "three")
    async with AsyncExitStack() as stack:
        talk = await talk_of(stack, room, "responses")
        show(talk, part("responses", RED))
        await talk.say()
        more = [{"role": "user", "content": "more"}]
        second = await talk.client.responses.create(
            model="m", input=more, previous_response_id=talk.last.id, store=False
        )
        assert second.output_text == "two"
        fresh = await talk_of(stack, room, "responses")
        show(fresh, part("responses", RED))
        await fresh.say(store=False)
        with pytest.raises(talk.refused, match="not kept"):
            await fresh.client.responses.create(model="m", input=more, previous_response_id=fresh.last.id)
    (seen,) = [each.image_url.url for each in room.app.asked[1].messages[0].content if each.image_url]
    assert seen == f"data:image/png;base64,{b64(RED)}"


@pytest.mark.parametrize(
    ("bounds", "what", "place"),
    [
        (ImageBounds(image_bytes=len(RED) - 1), "the most is", "messages.0.content.0"),
        (ImageBounds(request_images=1), "more than 1 images", "messages.0.content.1"),
        (ImageBounds(session_bytes=len(RED)), "of this session", "messages.0.content.1"),
    ],
)
async def test_bounds(bounds: ImageBounds, what: str, place: str, enter: Any) -> None:
    room = await enter(images=bounds)
    session = await room.open()
    content = [part("chat", RED), part("chat", BLUE)]
    async with of_session(session) as client:
        body = {"messages": [{"role": "user", "content": content}]}
        answer = await client.post("/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == place
    assert what in answer.json()["error"]["message"]
    assert room.app.asked == []


async def test_the_same_request_is_the_same_by_its_images(enter: Any) -> None:
    room = await enter()
    room.says("one", "two")
    session = await room.open()
    async with of_session(session, **{"x-stainless-retry-count": "1"}) as client:
        answers = []
        for data in (RED, RED, BLUE):
            body = {"model": "m", "messages": [{"role": "user", "content": [part("chat", data)]}]}
            answers.append((await client.post("/chat/completions", json=body)).json()["id"])
    assert answers[0] == answers[1] != answers[2]
    assert len(room.app.asked) == 2


def test_images_without_a_run_each_are_somewhere() -> None:
    image = Image(digest="d")
    message = Message(role="user", images=(image, image))
    assert [(p.start, p.end, p.exact) for p in placed([message], [1, 7, 7, 2, 7], 7)] == [
        (1, 3, True),
        (4, 5, True),
    ]
    assert [(p.start, p.end, p.exact) for p in placed([message], [1, 7, 7, 2], 7)] == [(0, 4, False)] * 2
    assert [p.exact for p in placed([message], [1, 7, 2, 7], None)] == [False] * 2
    assert placed([Message(role="user", content="a")], [7], 7) == ()
    assert placed([message], [], 7) == ()
