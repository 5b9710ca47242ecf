"""The suite that any backend passes, on the scripted one in process and on the adapters over HTTP."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollserve.backend.base import Backend
from rollserve.records.policy import BackendKind
from rollserve.testing.asgi import served
from rollserve.testing.backend_conformance import BackendConformance, Subject, TextConformance
from rollserve.testing.scripted import ScriptedBackend, ScriptedEngine, random_reply
from rollserve.testing.scripted_chat import ChatApp, Form
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.testing.scripted_sglang import SglangApp


def slow_engine(**options: Any) -> ScriptedEngine:
    """A token every 5 ms: long replies can be stopped while they run."""
    return ScriptedEngine(
        random_reply(400),
        context_tokens=1024,
        latency_s=2.0,
        chunk_tokens=1,
        **options,
    )


class TestScripted(BackendConformance):
    @pytest.fixture
    async def subject(self) -> Subject:
        engine = slow_engine()

        async def running() -> int:
            return len(engine.running)

        return Subject(backend=ScriptedBackend(engine), model="scripted", overlong=2000, running=running)


class OverHttp(BackendConformance):
    kind: BackendKind
    reports_prompt = True

    @pytest.fixture
    async def subject(self, connect: Callable[..., Backend]) -> AsyncIterator[Subject]:
        engine = slow_engine(label="v1")

        async def running() -> int:
            return len(engine.running)

        async with serving(ScriptedApp(engine)) as url:
            backend = connect(url, self.kind)
            yield Subject(backend=backend, model="scripted", overlong=2000, running=running)
            await backend.close()


class TestVllmRoute(OverHttp):
    kind = BackendKind.VLLM


class TestOpenAIRoute(OverHttp):
    kind = BackendKind.OPENAI


class OverSglang(BackendConformance):
    """On a fake that follows SGLang's source; the real server was never asked."""

    incremental: bool

    @pytest.fixture
    async def subject(self, connect: Callable[..., Backend]) -> AsyncIterator[Subject]:
        engine = slow_engine(label="v1")

        async def running() -> int:
            return len(engine.running)

        async with serving(SglangApp(engine, incremental=self.incremental)) as url:
            backend = connect(url, BackendKind.SGLANG)
            yield Subject(backend=backend, model="scripted", overlong=2000, running=running)
            await backend.close()


class TestSglang(OverSglang):
    incremental = False


class TestSglangIncremental(OverSglang):
    incremental = True


class OverChat(BackendConformance):
    """On a fake engine that renders; ``form`` says whose answers it gives."""

    form: Form

    @pytest.fixture
    async def subject(self, connect: Callable[..., Backend]) -> AsyncIterator[Subject]:
        engine = slow_engine(label=None)

        async def running() -> int:
            return len(engine.running)

        async with serving(ChatApp(engine, self.form)) as url:
            tokens = self.form != "text"
            backend = connect(url, BackendKind.CHAT if tokens else BackendKind.TEXT)
            yield Subject(
                backend=backend,
                model="scripted",
                overlong=2000,
                running=running,
                reports_prompt=tokens,
                scores=False,
                chat=True,
            )
            await backend.close()


class TestChatOfVllm(OverChat):
    form = "vllm"


class TestChatOfSglang(OverChat):
    form = "sglang"


class TestChatOfLlamaCpp(OverChat):
    form = "llama.cpp"


class TestText(TextConformance, OverChat):
    form = "text"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    directory = tmp_path_factory.mktemp("model")
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


class TestLocalServer(BackendConformance):
    """On a tiny random model; needs the extra ``local``."""

    @pytest.fixture
    async def subject(self, model_dir: Path, connect: Callable[..., Backend]) -> AsyncIterator[Subject]:
        from rollserve.localserver.model import BatchModel, load_model
        from rollserve.localserver.server import LocalServer, ServerSettings, make_app

        model = BatchModel(load_model(str(model_dir), device="cpu", dtype="float32"), max_batch=16)
        server = LocalServer(model, ServerSettings("tiny", weight_version="v0"))

        async def running() -> int:
            return len(server.engine.running)

        async with served(make_app(server), lifespan="on") as url:
            backend = connect(url, BackendKind.LOCAL, "tiny")
            yield Subject(backend=backend, model="tiny", overlong=2000, long_tokens=900, running=running)
            await backend.close()


@pytest.mark.vllm
@pytest.mark.skipif("ROLLSERVE_TEST_VLLM_URL" not in os.environ, reason="no server is named to test")
class TestRealVllm(BackendConformance):
    """Against a server started with ``--enable-scale-out --logprobs-mode processed_logprobs``, at
    ``ROLLSERVE_TEST_VLLM_URL``, serving ``ROLLSERVE_TEST_VLLM_MODEL`` (``tiny``)."""

    @pytest.fixture
    async def subject(self, connect: Callable[..., Backend]) -> Subject:
        url = os.environ["ROLLSERVE_TEST_VLLM_URL"]
        model = os.environ.get("ROLLSERVE_TEST_VLLM_MODEL", "tiny")
        backend = connect(url, BackendKind.VLLM, model)
        info = await backend.probe()
        assert info.context_tokens is not None
        return Subject(
            backend=backend,
            model=model,
            overlong=info.context_tokens + 1,
            long_tokens=info.context_tokens - 16,
        )


@pytest.mark.vllm
@pytest.mark.skipif("ROLLSERVE_TEST_VLLM_CHAT_URL" not in os.environ, reason="no server is named to test")
class TestRealVllmChat(BackendConformance):
    """Against a server with a tokenizer and a chat template, started with ``--logprobs-mode
    processed_logprobs``, at ``ROLLSERVE_TEST_VLLM_CHAT_URL``, serving ``ROLLSERVE_TEST_VLLM_MODEL``."""

    @pytest.fixture
    async def subject(self, connect: Callable[..., Backend]) -> Subject:
        url = os.environ["ROLLSERVE_TEST_VLLM_CHAT_URL"]
        model = os.environ.get("ROLLSERVE_TEST_VLLM_MODEL", "tiny")
        backend = connect(url, BackendKind.CHAT, model)
        info = await backend.probe()
        assert info.context_tokens is not None
        return Subject(
            backend=backend, model=model, overlong=info.context_tokens + 1, scores=False, chat=True
        )
