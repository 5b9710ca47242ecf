"""An API server with one namespace, for the runtime ``kubernetes``: pods that really run commands, in process
namespaces of this machine, and faults on request.

It plays what the runtime asks for (pods, their exec by websocket, network policies) as Kubernetes documents
it. It is no cluster: nothing is scheduled, pulled, bounded or kept off a network.
"""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import WSMsgType, web

from rollserve.sandbox.kubernetes.runtime import KubernetesRuntime
from rollserve.testing.kubernetes_pods import PlayedPod

NAMESPACE, TOKEN = "rollouts", "a-token"
KUBECONFIG = "kubeconfig"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_POLICIES = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_CLOSE = 255
_LONGEST_LINE = 1 << 20

T = TypeVar("T")


@dataclass
class Fault:
    """What happens to one request instead: an answer, or a connection cut (``status`` 0). ``done``: what was
    asked for is done all the same. ``after_s`` is how long that takes."""

    status: int
    reason: str = ""
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    done: bool = False
    after_s: float = 0.0


class FakeCluster:
    """Runs in a thread of its own, as blocking callers ask it too. ``faults`` are met in order by requests of
    their kind (``create``, ``get``, ``list``, ``delete``, ``exec``, ``policy``); ``stuck`` is the status of
    pods that are made from now on; with ``lingering`` a deleted pod does not go; ``protocols`` are what exec
    knows."""

    def __init__(self) -> None:
        self.pods: dict[str, PlayedPod] = {}
        self.policies: dict[str, Any] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.asked: list[str] = []
        self.stuck: dict[str, Any] | None = None
        self.lingering = False
        self.protocols: tuple[str, ...] = _PROTOCOLS
        self.url = ""
        self._folder = tempfile.TemporaryDirectory(prefix="rollserve-pods-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life
    def start(self) -> None:
        self._thread.start()
        self.url = self.do(self._serve())

    def close(self) -> None:
        self.do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """From another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _serve(self) -> str:
        app = web.Application(middlewares=[self._door])
        app.router.add_post(_PODS, self._create)
        app.router.add_get(_PODS, self._list)
        app.router.add_get(_PODS + "/{name}", self._get)
        app.router.add_delete(_PODS + "/{name}", self._delete)
        app.router.add_get(_PODS + "/{name}/exec", self._exec)
        app.router.add_post(_POLICIES, self._make_policy)
        app.router.add_get(_POLICIES + "/{name}", self._get_policy)
        self._runner = web.AppRunner(app, max_line_size=_LONGEST_LINE, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pod in self.pods.values():
            await pod.end()

    def kubeconfig(self, folder: Path) -> Path:
        user = {"name": "u", "user": {"token": TOKEN}}
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        path = folder / KUBECONFIG
        told = {
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [user],
            "contexts": [{"name": "here", "context": context}],
        }
        path.write_text(json.dumps(told))
        return path

    def evict(self, name: str, message: str) -> None:
        self.do(self.pods[name].fail("Evicted", message))

    # -- requests
    @web.middleware
    async def _door(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized", "Unauthorized")
        kind = handler.__name__.strip("_").replace("make_policy", "policy").replace("get_policy", "policy")
        self.asked.append(kind)
        waiting = self.faults.get(kind)
        if not waiting:
            answered: web.StreamResponse = await handler(request)
            return answered
        fault = waiting.pop(0)
        if fault.done:
            body = await request.read()
            self._later(self._carry_out(body, fault.after_s))
        if fault.status == 0:
            assert request.transport is not None
            request.transport.close()
        return _status(fault.status or 500, fault.reason, fault.message, fault.headers)

    async def _carry_out(self, body: bytes, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._add(json.loads(body))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _add(self, data: dict[str, Any]) -> PlayedPod:
        name = data["metadata"]["name"]
        data["metadata"]["namespace"] = NAMESPACE
        pod = PlayedPod(data, Path(self._folder.name) / name, stuck=copy.deepcopy(self.stuck))
        self.pods[name] = pod
        self._later(pod.start())
        return pod

    async def _create(self, request: web.Request) -> web.Response:
        data = await request.json()
        name = data["metadata"]["name"]
        if name in self.pods:
            return _status(409, "AlreadyExists", f'pods "{name}" already exists')
        return _json(self._add(data).data, 201)

    async def _get(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return _json(pod.data) if pod is not None else _missing(request)

    async def _list(self, request: web.Request) -> web.Response:
        wanted = [part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part]
        found = [
            pod.data
            for pod in self.pods.values()
            if all(pod.data["metadata"].get("labels", {}).get(name) == value for name, value in wanted)
        ]
        listed = {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": found}
        return _json(listed)

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _missing(request)
        pod.data["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self._later(self._remove(request.match_info["name"], pod))
        return _json(pod.data)

    async def _remove(self, name: str, pod: PlayedPod) -> None:
        await pod.end()
        if not self.lingering:
            self.pods.pop(name, None)

    async def _make_policy(self, request: web.Request) -> web.Response:
        data = await request.json()
        self.policies[data["metadata"]["name"]] = data
        return _json(data, 201)

    async def _get_policy(self, request: web.Request) -> web.Response:
        found = self.policies.get(request.match_info["name"])
        return _json(found) if found is not None else _missing(request)

    # -- exec
    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _missing(request)
        if not pod.running:
            return _status(500, "InternalError", "container not found")
        socket = web.WebSocketResponse(protocols=self.protocols)
        await socket.prepare(request)
        try:
            async for channel, data in pod.execute(request.query.getall("command"), _stdin(socket)):
                await (_send_end(socket, int(data)) if channel == 3 else _send(socket, channel, data))
        except OSError:
            await socket.close(code=1006)
        await socket.close()
        return socket


async def _stdin(socket: web.WebSocketResponse) -> AsyncIterator[bytes]:
    """Until its channel is closed."""
    async for message in socket:
        if message.type is WSMsgType.BINARY and message.data[:1] == b"\0":
            yield message.data[1:]
        elif message.type is WSMsgType.BINARY and message.data == bytes([_CLOSE, 0]):
            return


async def _send(socket: web.WebSocketResponse, channel: int, data: bytes) -> None:
    await socket.send_bytes(bytes([channel]) + data)


async def _send_end(socket: web.WebSocketResponse, code: int) -> None:
    told: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if code != 0:
        cause = {"reason": "ExitCode", "message": str(code)}
        told = {
            "metadata": {},
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "message": f"exit code {code}",
            "details": {"causes": [cause]},
        }
    await _send(socket, 3, json.dumps(told).encode())


def _missing(request: web.Request) -> web.Response:
    return _status(404, "NotFound", f'"{request.match_info["name"]}" not found')


def _status(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    told = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }
    return _json(told, code, headers)


def _json(data: Any, code: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """aiohttp would add a character set, which an API server does not."""
    said = {"Content-Type": "application/json", **(headers or {})}
    return web.Response(body=json.dumps(data).encode(), status=code, headers=said)


def make_runtime(*, data_dir: Path) -> KubernetesRuntime:
    """Of the cluster that ``KUBECONFIG`` leads to."""
    return KubernetesRuntime(data_dir=data_dir)


@contextmanager
def cluster_process(folder: Path) -> Iterator[Path]:
    """One in a process of its own; yields its kubeconfig, in ``folder``."""
    line = [sys.executable, "-m", "rollserve.testing.kubernetes_server", str(folder)]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Path(process.stdout.readline().decode().strip())
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def main() -> None:
    """Until stdin ends."""
    cluster = FakeCluster()
    cluster.start()
    sys.stdout.write(f"{cluster.kubeconfig(Path(sys.argv[1]))}\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.close()


if __name__ == "__main__":
    main()
