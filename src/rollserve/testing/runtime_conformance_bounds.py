"""What a sandbox is kept from, what bounds it, and its way out; where the report claims it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.base import Sandbox, SandboxLimits
from rollserve.testing.runtime_probes import (
    OWNER,
    PATIENCE_S,
    TTL_S,
    RuntimeChecks,
    accepts,
    bound_here,
    dial,
    greeting,
    host_has,
    host_socket,
    must_fail,
    open_folder,
    processes_with,
    unique_seconds,
)


class BoundChecks(RuntimeChecks):
    # -- the way out -------------------------------------------------------------------------------

    async def test_what_is_inside_reaches_the_socket(self, tmp_path: Path) -> None:
        async with self.able(tmp_path, "listen") as runtime:
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            await self.needs_bash(box)
            async with greeting(await box.listen()) as port:
                assert (await box.exec(dial(port), timeout_s=20)).output == "hello inside\n"

    async def test_the_socket_is_the_sandboxs_own(self, tmp_path: Path) -> None:
        async with self.isolated(tmp_path) as box, self.isolated(tmp_path) as other:
            await self.needs_bash(box)
            async with _unheard_of(box) as port, greeting(host_socket()) as outside:
                for sandbox, number in ((other, port), (box, outside), (other, outside)):
                    refused = await sandbox.exec(dial(number), timeout_s=20)
                    assert refused.exit_code != 0
                    assert "hello" not in refused.output
                error = await must_fail(OSError, asyncio.open_connection("127.0.0.1", port))
                assert isinstance(error, ConnectionRefusedError)

    async def test_the_socket_ends_with_the_sandbox(self, tmp_path: Path) -> None:
        async with self.able(tmp_path, "listen") as runtime:
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            sock = await box.listen()
            await box.close()
            with sock:
                assert not accepts(sock)
            await must_fail(SandboxError, box.listen())

    async def test_a_mounted_folder_is_read_only(self, tmp_path: Path) -> None:
        with open_folder() as folder:
            (folder / "tool").write_text("from outside")
            spec = self.spec(mounts={"/harness": str(folder)})
            async with self.runtime(tmp_path) as runtime:
                if not runtime.report().isolated:
                    error = await must_fail(InvalidInput, runtime.create(spec, owner=OWNER, ttl_s=TTL_S))
                    assert isinstance(error, InvalidInput)
                    assert error.field == "mounts"
                    return
                box = await runtime.create(spec, owner=OWNER, ttl_s=TTL_S)
                assert (await box.exec("cat /harness/tool")).output == "from outside"
                assert (await box.exec("echo x > /harness/tool || touch /harness/new")).exit_code != 0
                missing = self.spec(mounts={"/harness": str(folder / "missing")})
                await must_fail(SandboxError, runtime.create(missing, owner=OWNER, ttl_s=TTL_S))

    # -- isolation ---------------------------------------------------------------------------------

    async def test_no_network(self, tmp_path: Path) -> None:
        async with self.isolated(tmp_path) as box:
            links = (await box.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).output.split()
            assert links in ([], ["lo"])
            assert (await box.exec("tail -n +2 /proc/net/route")).output == ""

    async def test_host_files_are_hidden(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("s3cret")
        home = str(Path.home())
        paths = [
            str(secret),
            home if home not in ("/", "/tmp") else "/home/other",
            "/root/.ssh",
            "/etc/shadow",
            "/etc/ssh/ssh_host_rsa_key",
        ]
        async with self.isolated(tmp_path) as box:
            for path in paths:
                assert (await box.exec(f"ls -A '{path}'/ || head -c 1 '{path}'")).exit_code != 0, path
            await box.exec(f"ln -s '{secret}' link; ln -s /proc/1/root/etc/shadow link2")
            for link in ("link", "link2"):
                await must_fail(SandboxError, box.read_file(link))

    async def test_host_processes_are_out_of_reach(self, tmp_path: Path) -> None:
        async with self.isolated(tmp_path) as box:
            result = await box.exec("ls -d /proc/[0-9]* | wc -l")
            assert int(result.output) < 10
            pid = os.getpid()
            assert (await box.exec(f"kill -0 {pid} && grep -q python /proc/{pid}/cmdline")).exit_code != 0
            assert (await box.exec("kill -9 1; kill -9 -1; echo survived", timeout_s=30)).exit_code in (
                0,
                137,
            )
            assert (await box.exec("echo on")).output == "on\n"

    async def test_writes_are_private(self, tmp_path: Path) -> None:
        async with self.isolated(tmp_path) as first, self.isolated(tmp_path) as second:
            for folder in ("/workspace", "/tmp", "/etc", "/usr", "/dev/shm"):
                await first.exec(f"echo x > {folder}/rollserve-private")
                assert (await second.exec(f"test -e {folder}/rollserve-private")).exit_code == 1
                assert not host_has(f"{folder}/rollserve-private")

    async def test_no_capabilities(self, tmp_path: Path) -> None:
        async with self.isolated(tmp_path) as box:
            status = (await box.exec("grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs)' /proc/self/status")).output
            values = {line.split()[0]: int(line.split()[1], 16) for line in status.splitlines()}
            assert values == {"CapEff:": 0, "CapPrm:": 0, "CapBnd:": 0, "NoNewPrivs:": 1}
            assert (await box.exec("mount -t tmpfs none /tmp || unshare -m true")).exit_code != 0

    async def test_no_new_user_namespace(self, tmp_path: Path) -> None:
        async with self.runtime(tmp_path) as runtime:
            report = runtime.report()
            if not report.isolated or "user namespaces can be made" in report.detail:
                self.skip("user namespaces inside can't be disabled here")
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            assert (await box.exec("unshare -U true")).exit_code != 0

    # -- limits ------------------------------------------------------------------------------------

    async def test_limit_of_processes(self, tmp_path: Path) -> None:
        async with self.limited(tmp_path, "processes", SandboxLimits(processes=20)) as box:
            mark = unique_seconds()
            bomb = f"i=0; while [ $i -lt 60 ]; do sleep {mark} & i=$((i+1)); done; wait"
            running = asyncio.create_task(box.exec(bomb, timeout_s=60))
            assert 10 < await _most_of(mark, wanted=10) < 20
            running.cancel()
            await must_fail(asyncio.CancelledError, running)
            assert (await box.exec("echo on", timeout_s=60)).output == "on\n"

    async def test_limit_of_file_size(self, tmp_path: Path) -> None:
        async with self.limited(tmp_path, "file_mb", SandboxLimits(file_mb=2)) as box:
            result = await box.exec("head -c 4000000 /dev/zero > big", timeout_s=30)
            assert result.exit_code != 0
            assert int((await box.exec("wc -c < big")).output) <= 2 << 20

    async def test_limit_of_memory(self, tmp_path: Path) -> None:
        async with self.limited(tmp_path, "memory_mb", SandboxLimits(memory_mb=64)) as box:
            result = await box.exec("x=$(head -c 100000000 /dev/zero | tr '\\0' x); echo ${#x}", timeout_s=60)
            assert "100000000" not in result.output
            assert (await box.exec("echo on", timeout_s=60)).output == "on\n"

    async def test_limit_of_processor_time(self, tmp_path: Path) -> None:
        async with self.limited(tmp_path, "cpu_s", SandboxLimits(cpu_s=1)) as box:
            result = await box.exec("sh -c 'while :; do :; done'", timeout_s=60)
            assert not result.timed_out
            assert result.exit_code not in (0, None)


@asynccontextmanager
async def _unheard_of(box: Sandbox) -> AsyncIterator[int]:
    """A port that greets in the sandbox, of a number that nobody on the host listens on meanwhile."""
    async with AsyncExitStack() as stack:
        while True:
            port = await stack.enter_async_context(greeting(await box.listen()))
            if (held := bound_here(port)) is not None:
                stack.enter_context(held)
                yield port
                return


async def _most_of(mark: str, *, wanted: int) -> int:
    """How many processes there are once they are more than ``wanted`` and no more come."""
    seen = 0
    async with asyncio.timeout(PATIENCE_S):
        while seen <= wanted or seen != len(processes_with(mark)):
            seen = len(processes_with(mark))
            await asyncio.sleep(0.3)
    return seen
