"""Images to engines that render: what is sent, and what a backend that is said to take them must show."""

from __future__ import annotations

import base64
import zlib

import pytest

from rollserve.backend.base import Chat, GenerateRequest
from rollserve.backend.pictures import image_token, probe_picture
from rollserve.backend.registry import make_backend
from rollserve.errors import BackendError, InvalidInput
from rollserve.gateway.tokens import load_tokenizer
from rollserve.records.call import Message, SamplingParams
from rollserve.records.image import Image, digest_of
from rollserve.records.policy import BackendInfo, BackendKind, BackendSpec
from rollserve.testing.scripted import Reply, ScriptedEngine, replies
from rollserve.testing.scripted_chat import ChatApp, Form
from rollserve.testing.scripted_images import IMAGE_TOKEN
from rollserve.testing.scripted_server import serving

KINDS: dict[Form, BackendKind] = {
    "vllm": BackendKind.CHAT,
    "sglang": BackendKind.CHAT,
    "text": BackendKind.TEXT,
    "llama.cpp": BackendKind.CHAT,
}
DATA = b"\x89PNG \xfb\xff"
SEEN = Image(digest=digest_of(DATA), at=2, media_type="image/png", size_bytes=len(DATA), detail="low")
FAR = Image(digest="d", at=2, url="https://pictures.invalid/a.png")


def app(form: Form, *, sees: bool) -> ChatApp:
    ids = tuple(load_tokenizer("tiny").encode("ok<|im_end|>"))
    made = ChatApp(ScriptedEngine(replies(Reply(token_ids=ids)), label=None), form)
    made.takes_images = sees
    return made


async def probed(form: Form, *, sees: bool) -> tuple[BackendInfo, ChatApp]:
    made = app(form, sees=sees)
    async with serving(made) as url:
        backend = make_backend(BackendSpec(url=url, kind=KINDS[form], accepts=["text", "image"]), "scripted")
        try:
            return await backend.probe(), made
        finally:
            await backend.close()


@pytest.mark.parametrize("form", ["vllm", "sglang", "text"])
async def test_a_probe_shows_an_image(form: Form) -> None:
    info, made = await probed(form, sees=True)
    known = None if form == "text" else load_tokenizer("tiny").token_id(IMAGE_TOKEN)
    assert info.image_token == known
    ((_, (image,)),) = [message.seen() for asked in made.asked for message in asked.messages[-1:]][-1:]
    assert image.digest == digest_of(probe_picture())


@pytest.mark.parametrize("form", ["vllm", "text"])
async def test_a_backend_that_refuses_an_image_does_not_take_them(form: Form) -> None:
    with pytest.raises(InvalidInput, match=r"does not: .*At most 0 image") as caught:
        await probed(form, sees=False)
    assert caught.value.field == "accepts"


async def test_where_the_prompts_ids_do_not_hold_the_image_it_is_not_taken() -> None:
    """llama.cpp tells a prompt's ids by its template alone."""
    with pytest.raises(InvalidInput, match="its template makes") as caught:
        await probed("llama.cpp", sees=True)
    assert caught.value.field == "accepts"


async def test_parts_stand_as_they_stood() -> None:
    made = app("vllm", sees=True)
    message = Message(role="user", content="a b", images=(SEEN, FAR))
    request = GenerateRequest(
        request_id="r",
        model="scripted",
        token_ids=[],
        sampling=SamplingParams(max_tokens=8),
        chat=Chat(messages=(message,), pictures={SEEN.digest: DATA}),
    )
    async with serving(made) as url:
        backend = make_backend(BackendSpec(url=url, kind=BackendKind.CHAT), "scripted")
        made_of = await backend.generate(request)
        assert request.chat is not None
        with pytest.raises(BackendError, match="missing"):
            await backend.generate(GenerateRequest(
                request_id="r", model="scripted", token_ids=[], sampling=request.sampling,
                chat=Chat(messages=(message,)),
            ))  # fmt: skip
        await backend.close()
    (asked,) = made.asked
    content = asked.messages[0].content
    assert not isinstance(content, str)
    told = [(part.text, part.image_url and (part.image_url.url, part.image_url.detail)) for part in content]
    url = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"
    assert told == [("a ", None), ("", (url, "low")), ("", (FAR.url, None)), ("b", None)]
    assert made_of.prompt_ids == made.engine.seen[-1].token_ids


def test_the_probes_picture_is_a_png() -> None:
    data = probe_picture()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at = 8
    names = []
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        body = data[at + 4 : at + 8 + length]
        assert int.from_bytes(data[at + 8 + length : at + 12 + length], "big") == zlib.crc32(body)
        names.append(body[:4])
        at += 12 + length
    assert names == [b"IHDR", b"IDAT", b"IEND"]


@pytest.mark.parametrize(
    ("seen", "token"),
    [
        ([1, 8, 9, 9, 9, 8, 2], 9),
        ([1, 9, 2], None),
        ([1, 9, 9, 7, 7, 2], None),
        ([1, 1, 2, 2], None),
        ([], None),
    ],
)
def test_the_token_of_an_image(seen: list[int], token: int | None) -> None:
    assert image_token([1, 2], seen) == token
