"""A tiny random model, the engine over it, and the real server on a loopback port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
import uvicorn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollserve.localserver.model import BatchModel, load_model
from rollserve.localserver.server import LocalServer, ServerSettings, make_app

VOCAB = 300
CONTEXT = 512


def make_random_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM(config)
    torch.nn.Module.eval(model)
    return model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_random_model(0).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes, other weights."""
    directory = tmp_path_factory.mktemp("other")
    make_random_model(1).save_pretrained(directory)
    return directory


@pytest.fixture
def batch_model(model_dir: Path) -> BatchModel:
    return BatchModel(load_model(str(model_dir), device="cpu", dtype="float32"), max_batch=64)


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.004)
    raise TimeoutError("the condition did not come true")


@dataclass(frozen=True)
class Client:
    """The server under test, from outside."""

    http: aiohttp.ClientSession
    server: LocalServer

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        async with self.http.get(path) as response:
            assert response.status == 200
            return await response.json()

    async def generate(self, token_ids: list[int], *, request_id: str | None = None, **params: Any) -> Any:
        body = {
            "token_ids": token_ids,
            "sampling_params": {"logprobs": 0, **params},
            "request_id": request_id,
        }
        status, answer = await self.post("/inference/v1/generate", body)
        assert status == 200, answer
        return answer

    async def until_running(self, count: int) -> None:
        """Wait until ``count`` requests have sampled something."""
        engine = self.server.engine
        await eventually(lambda: sum(1 for s in list(engine.running) if s.token_ids) == count)


@pytest_asyncio.fixture
async def client(batch_model: BatchModel) -> AsyncIterator[Client]:
    server = LocalServer(batch_model, ServerSettings("tiny", weight_version="v0", max_body_bytes=1 << 20))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(make_app(server), log_level="warning", access_log=False, ws="none")
        uvicorn_server = uvicorn.Server(config)
        serving = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            await eventually(lambda: uvicorn_server.started)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(base, connector=connector) as http:
                yield Client(http, server)
        finally:
            uvicorn_server.should_exit = True
            await asyncio.wait_for(serving, 20)
