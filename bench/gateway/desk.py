"""The gateway as a process of its own, with a desk that opens sessions outside of what is measured."""

from __future__ import annotations

import argparse
import asyncio
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from gateway.floors import spent
from rollserve.backend.pool import BackendPool
from rollserve.build.http import HttpServer
from rollserve.build.process import tune_process
from rollserve.build.worker import PRELOAD
from rollserve.executor.base import PolicyView
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.http import make_app
from rollserve.gateway.service import GatewayService
from rollserve.records.policy import Backend, BackendInfo, BackendSpec, Policy, PolicySpec
from rollserve.records.run import RunSpec
from rollserve.records.task import Limits
from rollserve.store.payload_files import FilePayloadStore


class NoClock:
    @contextmanager
    def pause(self) -> Iterator[None]:
        yield

    def refundable(self) -> Callable[[], None]:
        return lambda: None


class Desk:
    """Opens and closes the sessions of the bench, outside of what is measured."""

    def __init__(self, service: GatewayService, payloads: FilePayloadStore) -> None:
        self._service = service
        self._payloads = payloads
        self._open: list[Any] = []
        self._count = 0

    async def sessions(self, count: int) -> list[str]:
        """New ones in the place of those before."""
        for session, segment in self._open:
            await session.close()
            segment.discard()
        self._open.clear()
        for _ in range(count):
            self._count += 1
            segment = self._payloads.open_segment("bench", f"a{self._count}")
            limits = Limits(max_turns=10_000, max_sampled_tokens=10_000_000)
            spec = SessionSpec(
                attempt_id=f"a{self._count}",
                rollout_id="r",
                run=RunSpec(policy="p"),
                limits=limits,
                segment=segment,
                clock=NoClock(),
            )
            self._open.append((await self._service.open_session(spec), segment))
        return [session.secret for session, _ in self._open]


async def gateway_role(sock: socket.socket, options: argparse.Namespace, upstream: str) -> None:
    tune_process(PRELOAD)
    service = GatewayService(lambda policy: BackendPool(model="m"))
    info = BackendInfo(engine="vllm", models=["m"], logprobs_mode="processed", reports_versions=True)
    spec = PolicySpec(name="p", model="m", tokenizer=options.tokenizer)
    backend = Backend(id="b", policy="p", spec=BackendSpec(url=upstream), info=info)
    policy = Policy(spec=spec).model_dump_json().encode()
    view = PolicyView(revision=1, policy_json=policy, backends_json=[backend.model_dump_json().encode()])
    service.update_policy(view)
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(service, FilePayloadStore(Path(folder)))
        app = make_app(service)

        async def with_desk(scope: Any, receive: Any, send: Any) -> None:
            if scope.get("path", "").startswith("/bench/"):
                count = scope["query_string"].decode()
                found = await desk.sessions(int(count)) if count else spent()
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": msgspec.json.encode(found)})
            else:
                await app(scope, receive, send)

        await HttpServer(with_desk, sock).start()
        await asyncio.Event().wait()
