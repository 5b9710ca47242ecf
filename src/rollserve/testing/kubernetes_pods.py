"""What plays the pods of ``kubernetes_server``: each a process tree under bubblewrap, with an object that
says how it stands."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollserve.testing import kubernetes_node
from rollserve.testing.machine import end_machine, machine

_START_S = 20.0
_PLACE = "/.node"
_SOCKET = "socket"


class PlayedPod:
    """``data`` is the object as the API shows it. ``stuck`` is the status of one that never starts."""

    def __init__(self, data: dict[str, Any], folder: Path, *, stuck: dict[str, Any] | None) -> None:
        self.data = data
        self._folder = folder
        self._stuck = stuck
        self._process: subprocess.Popen[bytes] | None = None
        metadata = data["metadata"]
        metadata["uid"] = str(uuid4())
        metadata["creationTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        data["status"] = stuck or {"phase": "Pending"}

    @property
    def running(self) -> bool:
        return self._process is not None

    async def start(self) -> None:
        if self._stuck is not None:
            return
        self._folder.mkdir()
        self._process = await asyncio.to_thread(self._popen)
        await self._listening()
        self.data["status"] = {
            "phase": "Running",
            "containerStatuses": [self._container({"running": {}}, ready=True)],
        }

    async def _listening(self) -> None:
        """Until its node does; it is a process of its own, which says so by its socket alone."""
        until = time.monotonic() + _START_S
        while not (self._folder / _SOCKET).exists():
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the node of {self.data['metadata']['name']} has no socket after {_START_S:g} s"
                )
            await asyncio.sleep(0.01)

    def _popen(self) -> subprocess.Popen[bytes]:
        node = [sys.executable, kubernetes_node.__file__, f"{_PLACE}/{_SOCKET}"]
        return subprocess.Popen(
            machine(node, "--bind", str(self._folder), _PLACE, "--die-with-parent"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "HOME": "/tmp"},
        )

    def _container(self, state: dict[str, Any], *, ready: bool = False) -> dict[str, Any]:
        spec = self.data["spec"]["containers"][0]
        return {
            "name": spec["name"],
            "image": spec["image"],
            "imageID": "",
            "restartCount": 0,
            "ready": ready,
            "state": state,
        }

    async def fail(self, reason: str, message: str) -> None:
        """As a node does that evicts it."""
        await self.end()
        ended = {"terminated": {"exitCode": 137, "reason": "Error"}}
        self.data["status"] = {
            "phase": "Failed",
            "reason": reason,
            "message": message,
            "containerStatuses": [self._container(ended)],
        }

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await end_machine(process)

    async def execute(
        self, command: list[str], stdin: AsyncIterator[bytes]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Channels and data; the last is 3, the exit code. Raises ``OSError`` when it ends meanwhile."""
        reader, writer = await asyncio.open_unix_connection(self._folder / _SOCKET)
        writer.write(json.dumps(command).encode() + b"\n")
        feeding = asyncio.create_task(_feed(stdin, writer))
        try:
            while head := await reader.read(1):
                size = int.from_bytes(await reader.readexactly(4), "big")
                yield head[0], await reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the container has ended") from error
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            writer.close()


async def _feed(stdin: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
    async for data in stdin:
        writer.write(data)
        await writer.drain()
    writer.write_eof()
