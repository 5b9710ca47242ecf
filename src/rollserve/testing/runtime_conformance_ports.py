"""From outside to a port of a sandbox."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from rollserve.errors import NotFound, SandboxError
from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.ports import forwarded, forwarded_tcp
from rollserve.testing.runtime_probes import OWNER, TTL_S, RuntimeChecks, must_fail, open_descriptors

_SERVE = (
    'use Socket; socket(S, 2, 1, 0); bind(S, sockaddr_in(0, inet_aton("127.0.0.1"))); listen(S, 20); '
    '($p) = sockaddr_in(getsockname(S)); open(F, ">port.part"); print F $p; close F; '
    'rename("port.part", "port"); '
    'while (accept(C, S)) { C->autoflush(1); while ($l = <C>) { print C "{}: $l" } close C }'
)


class PortChecks(RuntimeChecks):
    async def serve(self, box: Sandbox, word: str, port: int = 0) -> int:
        """A program inside that repeats each line it hears after ``word``; its port, any where it is 0."""
        if (await box.exec("command -v perl")).exit_code != 0:
            self.skip("the default image has no perl")
        program = _SERVE.replace("{}", word).replace("sockaddr_in(0,", f"sockaddr_in({port},")
        await box.exec(f"perl -MIO::Handle -e '{program}' >/dev/null 2>&1 &")
        shown = await box.exec("until [ -e port ]; do sleep 0.01; done; cat port", timeout_s=20)
        return int(shown.output)

    async def test_what_can_not_be_done_is_not_in_the_report(self, tmp_path: Path) -> None:
        async with self.runtime(tmp_path) as runtime:
            can = runtime.report().can
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            if "listen" not in can:
                await must_fail(SandboxError, box.listen())
            if "connect" not in can:
                await must_fail(SandboxError, box.connect(80))
            if "snapshot" not in can:
                await must_fail(SandboxError, box.snapshot())

    async def test_a_port_is_reached_from_outside(self, tmp_path: Path) -> None:
        async with self.able(tmp_path, "connect") as runtime:
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            port = await self.serve(box, "one")
            for _ in range(12):
                assert await _say(await box.connect(port), "hello") == "one: hello\n"

    async def test_a_port_is_the_sandboxs_own(self, tmp_path: Path) -> None:
        async with self.able(tmp_path, "connect") as runtime:
            if not runtime.report().isolated:
                self.skip(f"{runtime.name} does not isolate, and says so")
            boxes = [await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S) for _ in range(2)]
            with socket.socket() as held, socket.create_server(("127.0.0.1", 0)) as outside:
                held.bind(("127.0.0.1", 0))  # nobody else on the host listens on that number meanwhile
                port = await self.serve(boxes[0], "one", held.getsockname()[1])
                await must_fail(NotFound, boxes[1].connect(port))
                await must_fail(OSError, asyncio.open_connection("127.0.0.1", port))
                await must_fail(NotFound, boxes[0].connect(outside.getsockname()[1]))
            for wrong in (1, 0, 65536, -1):
                await must_fail(NotFound, boxes[0].connect(wrong))

    async def test_ports_end_with_the_sandbox(self, tmp_path: Path) -> None:
        async with self.able(tmp_path, "connect") as runtime:
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            port = await self.serve(box, "one")
            before = open_descriptors()
            sock = await box.connect(port)
            reader, writer = await asyncio.open_connection(sock=sock)
            await box.close()
            try:
                async with asyncio.timeout(20):
                    assert await reader.read() == b""
            except ConnectionResetError:
                pass
            finally:
                writer.transport.abort()
                await asyncio.sleep(0)
            assert open_descriptors() <= before
            await must_fail(SandboxError, box.connect(port))

    async def test_a_forwarded_port(self, tmp_path: Path) -> None:
        async with self.able(tmp_path, "connect") as runtime:
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            port = await self.serve(box, "one")
            async with forwarded(box, port) as path, forwarded_tcp(box, port) as number:
                for _ in range(3):
                    for opened in (
                        await asyncio.open_unix_connection(path),
                        await asyncio.open_connection("127.0.0.1", number),
                    ):
                        assert await _exchange(*opened, "hello") == "one: hello\n"
            async with forwarded(box, 1) as path:  # nothing listens there
                reader, writer = await asyncio.open_unix_connection(path)
                assert await reader.read() == b""
                writer.transport.abort()


async def _say(sock: socket.socket, text: str) -> str:
    return await _exchange(*await asyncio.open_connection(sock=sock), text)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: str) -> str:
    try:
        async with asyncio.timeout(20):
            writer.write(f"{text}\n".encode())
            writer.write_eof()
            return (await reader.read()).decode()
    finally:
        writer.transport.abort()
