"""Files of a sandbox, whole and in pieces."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from rollserve.errors import SandboxError, TooLarge
from rollserve.sandbox.transfer import download, upload
from rollserve.testing.runtime_probes import (
    RuntimeChecks,
    must_fail,
)


class FileChecks(RuntimeChecks):
    async def test_file_round_trip(self, tmp_path: Path) -> None:
        data = bytes(range(256)) * 3
        async with self.sandbox(tmp_path) as box:
            for path in ("f", "deep/er/f", "/tmp/rollserve-conformance/f", 'it\'s a "name"\n', "-f"):
                await box.write_file(path, data)
                assert await box.read_file(path) == data
            await box.write_file("f", b"")
            assert await box.read_file("f") == b""
            await box.exec("rm -r /tmp/rollserve-conformance")

    async def test_big_file(self, tmp_path: Path) -> None:
        data = secrets.token_bytes(5 << 20)
        async with self.sandbox(tmp_path, self.spec(files={"big": data})) as box:
            assert await box.read_file("big") == data
            await box.write_file("again", data)
            assert (await box.exec("cmp big again && wc -c < again")).output.split() == [str(5 << 20)]

    async def test_many_files_of_the_spec(self, tmp_path: Path) -> None:
        files = {f"d{i % 3}/f{i}": bytes([i]) * i for i in range(40)}
        async with self.sandbox(tmp_path, self.spec(files=files)) as box:
            for path, data in list(files.items())[::7]:
                assert await box.read_file(path) == data

    async def test_relative_to_the_working_directory(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            await box.exec("cd /tmp")
            await box.write_file("f", b"1")
            assert await box.read_file("/workspace/f") == b"1"

    async def test_unreadable_files(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            await box.exec("mkdir dir; mkfifo pipe; ln -s loop loop")
            for path in ("missing", "dir", "pipe", "loop", "/dev/zero", "missing/f"):
                await must_fail(SandboxError, box.read_file(path))
            await must_fail(SandboxError, box.write_file("dir", b"x"))
            await box.write_file("f", b"12345")
            await must_fail(TooLarge, box.read_file("f", limit_bytes=4))
            assert await box.read_file("f", limit_bytes=5) == b"12345"

    async def test_failed_big_write_spoils_nothing(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            await must_fail(SandboxError, box.write_file("/proc/nowhere/f", bytes(1 << 20)))
            await box.write_file("f", b"clean")
            assert await box.read_file("f") == b"clean"

    async def test_big_files_go_in_and_out_in_pieces(self, tmp_path: Path) -> None:
        piece = secrets.token_bytes(1 << 20)
        digest, taken = hashlib.sha256(), 0

        async def pieces(count: int) -> AsyncIterator[bytes]:
            for _ in range(count):
                yield piece

        async with self.sandbox(tmp_path) as box:
            await upload(box, "new/big file", pieces(40))
            async for data in download(box, "new/big file"):
                digest.update(data)
                taken += len(data)
                assert len(data) <= 1 << 20
            assert (taken, digest.digest()) == (40 << 20, hashlib.sha256(piece * 40).digest())
            await upload(box, "empty", pieces(0))
            assert [data async for data in download(box, "empty")] == []

    async def test_a_transfer_that_fails_says_so(self, tmp_path: Path) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(64):
                yield bytes(1 << 16)

        async def all_of(path: str) -> bytes:
            return b"".join([data async for data in download(box, path)])

        async with self.sandbox(tmp_path) as box:
            await box.exec("mkdir dir")
            for path in ("missing", "dir", "/dev/zero"):
                await must_fail(SandboxError, all_of(path))
            for path in ("/proc/nowhere/f", "/dev/null/f"):
                await must_fail(SandboxError, upload(box, path, pieces()))
            await box.close()
            await must_fail(SandboxError, all_of("f"))
