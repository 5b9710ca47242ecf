"""Snapshots of a sandbox, and sandboxes that are started from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.base import Runtime, Sandbox, SandboxLimits
from rollserve.testing.runtime_probes import (
    OWNER,
    TTL_S,
    RuntimeChecks,
    must_fail,
    open_folder,
    processes_with,
    unique_seconds,
    wait_until_present,
)


class SnapshotChecks(RuntimeChecks):
    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[Runtime]:
        """Whose snapshots lie where sandboxes can enter."""
        with open_folder() as folder:
            async with self.able(folder, "snapshot") as runtime:
                yield runtime

    async def fork(self, runtime: Runtime, snapshot: str, **files: bytes) -> Sandbox:
        spec = msgspec.structs.replace(self.spec(files=files), snapshot=snapshot)
        return await runtime.create(spec, owner=OWNER, ttl_s=TTL_S)

    async def test_a_fork_has_the_files_and_nothing_that_ran(self) -> None:
        mark = unique_seconds()
        async with self.keeping() as runtime:
            box = await runtime.create(self.spec(files={"given": b"given"}), owner=OWNER, ttl_s=TTL_S)
            await box.exec(
                "echo one > one; mkdir -p sub; echo deep > sub/deep; chmod 750 one; ln -s one link; "
                f"echo home > ~/h; echo tmp > /tmp/t; cd sub; export KEPT=1; sleep {mark} &"
            )
            await wait_until_present(mark)
            fork = await self.fork(runtime, await box.snapshot(), later=b"later")
            assert len(processes_with(mark)) == 1
            looks = 'cat given one sub/deep link ~/h /tmp/t later; echo ":${PWD##*/}:$KEPT"; ls -l one'
            lines = (await fork.exec(looks)).output.split("\n")
            assert lines[0] == "givenone"
            assert lines[1:6] == ["deep", "one", "home", "tmp", "later:workspace:"]
            assert lines[6].startswith("-rwxr-x---")
            assert (await box.exec('echo "${PWD##*/}:$KEPT"')).output == "sub:1\n"

    async def test_forks_do_not_see_each_other(self) -> None:
        async with self.keeping() as runtime:
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            await box.exec("echo first > f; echo gone > g")
            snapshot = await box.snapshot()
            await box.exec("echo second > f")
            forks = await asyncio.gather(*(self.fork(runtime, snapshot) for _ in range(3)))
            for number, fork in enumerate(forks):
                assert (await fork.exec("cat f")).output == "first\n"
                await fork.exec(f"echo {number} > f; rm g; echo {number} > /tmp/own")
            assert [(await fork.exec("cat f /tmp/own; ls")).output for fork in forks] == [
                f"{number}\n{number}\nf\n" for number in range(3)
            ]
            assert (await box.exec("cat f g")).output == "second\ngone\n"

    async def test_a_fork_of_a_fork_outlives_both(self) -> None:
        async with self.keeping() as runtime:
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            for number in range(3):
                await box.exec(f"echo {number} >> f; echo {number} > ~/h{number}; rm -f ~/h{number - 1}")
                snapshot = await box.snapshot()
                await box.close()
                box = await self.fork(runtime, snapshot)
            assert (await box.exec("cat f; cd; echo h*")).output == "0\n1\n2\nh2\n"

    async def test_what_is_no_snapshot(self) -> None:
        async with self.keeping() as runtime:
            await must_fail(InvalidInput, self.fork(runtime, "ab" * 32))
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            await box.close()
            await must_fail(SandboxError, box.snapshot())

    async def test_more_than_may_be_written_is_not_kept(self) -> None:
        async with self.keeping() as runtime:
            spec = self.spec(limits=SandboxLimits(disk_mb=8))
            box = await runtime.create(spec, owner=OWNER, ttl_s=TTL_S)
            await box.exec("for i in 1 2 3; do truncate -s 7M hole$i; done")
            error = await must_fail(SandboxError, box.snapshot())
            assert "larger than the sandbox may write" in str(error)
            await box.exec("rm hole2 hole3")
            fork = await self.fork(runtime, await box.snapshot())
            assert (await fork.exec("wc -c < hole1")).output == f"{7 << 20}\n"
