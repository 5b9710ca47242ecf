"""CPU of one in-process gateway call, without a backend: ``python bench/gateway_forward.py``.

Sessions of ``--turns`` tool turns, ``--tokens`` sampled ids each, run one after another; the pool
answers at once. Prints microseconds a call, and where they go.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollserve.backend.base import GenerateRequest, Generation, Routed, TokenSink, unrefunded
from rollserve.executor.base import PolicyView
from rollserve.gateway import forward, rendering
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.service import GatewayService
from rollserve.gateway.tokens import load_tokenizer
from rollserve.gateway.tree import Tree
from rollserve.records.call import Message
from rollserve.records.policy import Backend, BackendInfo, BackendSpec, Policy, PolicySpec, RendererSpec
from rollserve.records.run import RunSpec
from rollserve.records.task import Limits
from rollserve.records.update import WeightUpdate
from rollserve.sandbox.tools.plain import ShellTool
from rollserve.store.payload_files import FilePayloadStore

INFO = BackendInfo(engine="none", models=["m"], logprobs_mode="processed")


class InstantPool:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.logprobs = [-0.25] * len(ids)

    def update(self, backends: list[Backend]) -> None:
        self.backends = backends

    def hold(self, update: WeightUpdate | None) -> None:
        """Weights do not change here."""

    def stats(self) -> dict[str, dict[str, Any]]:
        return {}

    async def generate(
        self,
        session_id: str,
        request: GenerateRequest,
        on_tokens: TokenSink | None = None,
        *,
        pause: Callable[[], AbstractContextManager[None]] = nullcontext,
        refundable: Callable[[], Callable[[], None]] = unrefunded,
    ) -> Routed:
        generation = Generation(token_ids=self.ids, logprobs=self.logprobs, finish_reason="stop")
        return Routed(generation=generation, backend_id="b", info=INFO)

    async def stalled(self, session_id: str, run_s: float) -> None:
        return None

    def release(self, session_id: str) -> None:
        self.backends = self.backends

    async def close(self) -> None:
        self.backends = []


class NoClock:
    @contextmanager
    def pause(self) -> Iterator[None]:
        yield

    def refundable(self) -> Callable[[], None]:
        return unrefunded()


def sampled_ids(tokenizer_name: str, count: int) -> list[int]:
    """A turn of ``count`` ids: text, then a tool call."""
    tokenizer = load_tokenizer(tokenizer_name)
    call = tokenizer.encode(
        '\n<tool_call>\n{"name": "shell", "arguments": {"command": "ls -la"}}\n</tool_call>'
    )
    call.append(tokenizer.eos_token_id or 0)
    text = tokenizer.encode("The next thing to look at is what this folder holds. " * (count // 4))
    return text[: max(0, count - len(call))] + call


class Stages:
    """Time inside wrapped functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, attribute, timed)


def make_service(arguments: argparse.Namespace) -> GatewayService:
    pool = InstantPool(sampled_ids(arguments.tokenizer, arguments.tokens))
    service = GatewayService(lambda policy: pool)
    spec = PolicySpec(
        name="p", model="m", tokenizer=arguments.tokenizer, renderer=RendererSpec(name=arguments.renderer)
    )
    backend = Backend(id="b", policy="p", spec=BackendSpec(url="http://b"), info=INFO)
    service.update_policy(
        PolicyView(
            revision=1,
            policy_json=Policy(spec=spec).model_dump_json().encode(),
            backends_json=[backend.model_dump_json().encode()],
        )
    )
    return service


async def episode(service: GatewayService, payloads: FilePayloadStore, index: int, turns: int) -> None:
    segment = payloads.open_segment("run", f"attempt{index}")
    session = await service.open_session(
        SessionSpec(
            attempt_id=f"attempt{index}",
            rollout_id="r",
            run=RunSpec(policy="p"),
            limits=Limits(max_turns=10_000, max_sampled_tokens=10_000_000),
            segment=segment,
            clock=NoClock(),
        )
    )
    messages = [
        Message(role="system", content="You are a helpful agent."),
        Message(role="user", content="Go."),
    ]
    tools = (ShellTool.schema,)
    for turn in range(turns):
        reply = await session.model.chat(messages, tools=tools)
        messages.append(reply.message)
        for call in reply.message.tool_calls:
            output = f"total {turn}\n" + "drwxr-xr-x 2 root root 4096 file.txt\n" * 4
            messages.append(Message(role="tool", content=output, tool_call_id=call.id))
    await session.close()
    segment.discard()


async def measure(arguments: argparse.Namespace, folder: Path, stages: Stages | None) -> float:
    """CPU microseconds a call."""
    service, payloads = make_service(arguments), FilePayloadStore(folder)
    await episode(service, payloads, 0, 2)
    if stages is not None:
        stages.wrap(Tree, "match", "match")
        stages.wrap(rendering.Rendering, "render", "render (first turns)")
        stages.wrap(rendering.Rendering, "extend", "extend")
        stages.wrap(rendering.Rendering, "parse", "parse")
        stages.wrap(forward, "inexact", "truth")
        stages.wrap(type(payloads.open_segment("run", "x")), "append_call", "append")
    start = time.process_time()
    for index in range(1, arguments.episodes + 1):
        await episode(service, payloads, index, arguments.turns)
    used = time.process_time() - start
    await service.close()
    return 1e6 * used / float(arguments.episodes * arguments.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--tokenizer", default="tiny")
    parser.add_argument("--renderer", default="qwen3")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        total = asyncio.run(measure(arguments, Path(folder) / "a", None))
        stages = Stages()
        asyncio.run(measure(arguments, Path(folder) / "b", stages))
    calls = arguments.episodes * arguments.turns
    split = {name: round(1e6 * seconds / calls, 1) for name, seconds in stages.seconds.items()}
    print(json.dumps({"cpu_us_per_call": round(total, 1), "us_by_stage": split}, indent=2))


if __name__ == "__main__":
    main()
