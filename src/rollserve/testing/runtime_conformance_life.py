"""How sandboxes begin and end, and what is left of them."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.base import SandboxSpec, SpareMaker
from rollserve.testing.runtime_probes import (
    OWNER,
    TTL_S,
    RuntimeChecks,
    must_fail,
    processes_with,
    processes_with_environment,
    unique_seconds,
    wait_until_gone,
    wait_until_present,
)

WORKER = """
import asyncio, sys
from pathlib import Path
from rollserve.testing.runtime_probes import load_runtime, OWNER
from rollserve.sandbox.base import SandboxSpec

async def main():
    runtime = load_runtime(sys.argv[1], Path(sys.argv[2]))
    sandbox = await runtime.create(SandboxSpec(image=sys.argv[5]), owner=OWNER, ttl_s=600)
    await sandbox.exec(sys.argv[3])
    print("ready", flush=True)
    await sandbox.exec(sys.argv[4], timeout_s=600)

asyncio.run(main())
"""


class LifeChecks(RuntimeChecks):
    async def test_unknown_image(self, tmp_path: Path) -> None:
        async with self.runtime(tmp_path) as runtime:
            for image in ("no-such-image:1", str(tmp_path / "missing")):
                error = await must_fail(
                    InvalidInput, runtime.create(SandboxSpec(image=image), owner=OWNER, ttl_s=TTL_S)
                )
                assert isinstance(error, InvalidInput)
                assert error.field == "image"

    async def test_close_ends_every_process(self, tmp_path: Path) -> None:
        marks = [unique_seconds() for _ in range(3)]
        async with self.sandbox(tmp_path) as box:
            await box.exec(f"sleep {marks[0]} & (setsid sh -c '(sleep {marks[1]}; :) &' &)")
            running = asyncio.create_task(box.exec(f"nohup sleep {marks[2]}"))
            for mark in marks:
                await wait_until_present(mark)
            await box.close()
            assert not [mark for mark in marks if processes_with(mark)]
            await must_fail(SandboxError, running)
            await box.close()
            for late in (box.exec("true"), box.read_file("f"), box.write_file("f", b"")):
                await must_fail(SandboxError, late)

    async def test_runtime_close_closes_all(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.runtime(tmp_path) as runtime:
            for _ in range(3):
                box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
                await box.exec(f"sleep {mark} &")
        assert not processes_with(mark)

    async def test_time_to_live(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.runtime(tmp_path) as runtime:
            box = await runtime.create(self.spec(), owner=OWNER, ttl_s=1.0)
            await must_fail(SandboxError, box.exec(f"sleep {mark}"))
            await wait_until_gone(mark)

    async def test_cancelled_create_leaves_nothing(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        spec = self.spec(env={"MARK": mark})
        async with self.runtime(tmp_path) as runtime:
            for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008):
                task = asyncio.create_task(runtime.create(spec, owner=OWNER, ttl_s=TTL_S))
                await asyncio.sleep(delay_s)
                task.cancel()
                try:
                    await (await task).close()
                except asyncio.CancelledError:
                    pass
            assert not processes_with_environment(f"MARK={mark}")

    async def test_a_spare_becomes_what_is_asked_for(self, tmp_path: Path) -> None:
        async with self.runtime(tmp_path) as runtime:
            if not isinstance(runtime, SpareMaker):
                self.skip(f"{runtime.name} makes none ahead")
                return
            spec = self.spec(files={"sub/f": b"\0x"}, env={"TOKEN": "it's $x"})
            spare = await runtime.create_spare(self.spec(), ttl_s=2.0)
            await spare.adopt(spec, ttl_s=TTL_S)
            await asyncio.sleep(2.1)
            assert (await spare.exec('printf %s "$TOKEN"')).output == "it's $x"
            assert await spare.read_file("sub/f") == b"\0x"
            await spare.exec("exit 3")
            assert (await spare.exec('printf %s "$TOKEN"')).output == "it's $x"
            gone = await runtime.create_spare(self.spec(), ttl_s=TTL_S)
            await gone.close()
            await must_fail(SandboxError, gone.adopt(spec, ttl_s=TTL_S))

    async def test_many_at_once(self, tmp_path: Path) -> None:
        async with self.runtime(tmp_path) as runtime:

            async def one(number: int) -> str:
                box = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
                return (await box.exec(f"echo {number} > n; cat n")).output

            outputs = await asyncio.gather(*(one(number) for number in range(self.many)))
            assert outputs == [f"{number}\n" for number in range(self.many)]

    async def test_reap_after_a_killed_worker(self, tmp_path: Path) -> None:
        marks = [unique_seconds(), unique_seconds()]
        async with self.runtime(tmp_path) as runtime:
            mine = await runtime.create(self.spec(), owner=OWNER, ttl_s=TTL_S)
            daemon = f"(setsid sh -c '(sleep {marks[0]}; :) &' &)"
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WORKER, self.factory, str(tmp_path), daemon, f"sleep {marks[1]}",
                self.image_reference(),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert worker.stdout is not None
            assert await asyncio.wait_for(worker.stdout.readline(), 60) == b"ready\n"
            for mark in marks:
                await wait_until_present(mark)
            worker.send_signal(signal.SIGKILL)
            await worker.wait()
            await runtime.reap()
            for mark in marks:
                await wait_until_gone(mark)
            assert await runtime.reap() == 0
            assert (await mine.exec("echo mine")).output == "mine\n"
