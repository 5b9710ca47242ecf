"""A task with a picture and a tool that draws, through the service, to an engine that sees."""

from __future__ import annotations

import base64

import httpx
import pytest

from rollserve.errors import InvalidInput
from rollserve.records.image import digest_of
from rollserve.records.policy import BackendKind
from rollserve.records.task import TaskPicture
from rollserve.testing.scripted import Reply, ScriptedEngine
from rollserve.testing.scripted_chat import ChatApp
from rollserve.testing.scripted_server import serving
from rollserve.tiny_tokenizer import TinyTokenizer
from rollserve.wire import CreatePolicy, RegisterBackend
from tests.integration.conftest import Server, add_policy, play

PNG = b"\x89PNG picture"
PICTURE = TaskPicture(url=f"data:image/png;base64,{base64.b64encode(PNG).decode()}", at=0)
DRAW = '<tool_call>\n{"name": "python", "arguments": {"code": "import matplotlib.pyplot"}}\n</tool_call>'
PYPLOT = (
    "class Figure:\n    def savefig(self, file, format): file.write(b'figure')\n"
    "def get_fignums(): return [1]\ndef figure(number): return Figure()\ndef close(which): pass\n"
)
FILES = {"matplotlib/__init__.py": "", "matplotlib/pyplot.py": PYPLOT}


def draws_once(prompt: list[int]) -> Reply:
    tokenizer = TinyTokenizer()
    drawn = "<tool_response>" in tokenizer.decode(prompt)
    return Reply(token_ids=tuple(tokenizer.encode(f"{'42' if drawn else DRAW}<|im_end|>")))


async def test_pictures_and_figures_reach_the_model_and_the_trainer(server: Server) -> None:
    app = ChatApp(ScriptedEngine(draws_once, label=None))
    app.takes_images = True
    async with server.client() as client, serving(app) as url:
        await client.create_policy(
            CreatePolicy(name="tiny", model="scripted", tokenizer="tiny", interface="chat")
        )
        backend = RegisterBackend(url=url, kind=BackendKind.CHAT, accepts=["text", "image"])
        await client.register_backend("tiny", backend)
        group = await play(client, pictures=[PICTURE], tools=["python"], files=FILES)
        (rollout,) = group.rollouts
        assert rollout.reward == 1.0, rollout.rollout.failure
        (sample,) = rollout.samples
        attempt = (await client.rollout(rollout.rollout.id)).last_attempt
        assert attempt is not None
        place = f"{server.url}/v1/attempts/{attempt.id}/artifacts"
        async with httpx.AsyncClient() as http:
            kept = [(await http.get(f"{place}/{each.image.artifact}")).content for each in sample.images]
    assert sample.exact
    assert [each.image.digest for each in sample.images] == [digest_of(PNG), digest_of(b"figure")]
    assert kept == [PNG, b"figure"]
    *_, told = app.asked[-1].messages
    assert not isinstance(told.content, str)
    assert [part.type for part in told.content] == ["text", "image_url"]
    assert told.content[0].text.endswith("/figures/1.png]")


async def test_a_policy_that_takes_none_is_named_at_submit(server: Server, backend_url: str) -> None:
    async with server.client() as client:
        await add_policy(client, backend_url)
        with pytest.raises(InvalidInput, match="policy 'tiny' takes no images") as refused:
            await play(client, pictures=[PICTURE])
        assert refused.value.field == "groups.0.task.pictures"
        assert [rollout async for rollout in client.rollouts()] == []
