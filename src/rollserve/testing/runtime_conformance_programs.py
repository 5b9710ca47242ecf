"""Programs and consoles of a sandbox, to their end and beside its shell."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from rollserve.errors import Conflict, SandboxError
from rollserve.sandbox.base import ConsoleState
from rollserve.testing.runtime_probes import (
    RuntimeChecks,
    Said,
    must_fail,
    open_descriptors,
    processes_with,
    unique_seconds,
    wait_until_gone,
    wait_until_present,
)


class ProgramChecks(RuntimeChecks):
    # -- programs ----------------------------------------------------------------------------------

    async def test_output_of_a_program_comes_as_it_is_printed(self, tmp_path: Path) -> None:
        said = Said()
        async with self.sandbox(tmp_path) as box:
            await box.exec("mkdir sub; cd sub; export A=1")
            running = asyncio.create_task(
                box.run("echo one; echo two >&2; cd /; export A=2; sleep 60", **said.hears())
            )
            await said.until("one\ntwo\n")
            running.cancel()
            await must_fail(asyncio.CancelledError, running)
            assert await box.run("cat; exit 5", **said.hears()) == 5
            assert (await box.exec("echo ${PWD##*/} $A")).output == "sub 1\n"

    async def test_a_program_ends_with_all_it_started(self, tmp_path: Path) -> None:
        marks = [unique_seconds() for _ in range(3)]
        jobs = f"sleep {marks[0]} & (setsid sh -c '(sleep {marks[1]}; :) &' &); nohup sleep {marks[2]} &"
        waits = f"{jobs} until [ -e go ]; do sleep 0.01; done"
        said = Said()
        async with self.sandbox(tmp_path) as box:
            running = asyncio.create_task(box.run(waits, **said.hears()))
            for mark in marks:
                await wait_until_present(mark)
            running.cancel()
            await must_fail(asyncio.CancelledError, running)
            assert not [mark for mark in marks if processes_with(mark)]
            await box.write_file("go", b"")
            assert await box.run(waits, **said.hears()) == 0
            assert not [mark for mark in marks if processes_with(mark)]
            assert await box.run(f"{jobs} sleep 60", **said.hears(timeout_s=0.5)) is None
            assert not [mark for mark in marks if processes_with(mark)]
            assert (await box.exec("echo on")).output == "on\n"

    async def test_a_program_can_not_hurt_its_shell(self, tmp_path: Path) -> None:
        said = Said()
        async with self.sandbox(tmp_path) as box:
            assert await box.run("kill -9 $$; sleep 60", **said.hears()) not in (None, 0)
            assert await box.run("echo 'open", **said.hears()) not in (None, 0)
            assert (await box.exec("echo on")).output == "on\n"

    # -- programs beside the shell, consoles -------------------------------------------------------

    async def test_a_program_is_spoken_to_over_pipes(self, tmp_path: Path) -> None:
        errors: list[bytes] = []
        data = secrets.token_bytes(3 << 20)
        async with self.sandbox(tmp_path) as box:
            await box.exec("mkdir sub; cd sub; export A=1")
            program = await box.spawn("pwd | grep -o 'sub$'; echo $A >&2; exec cat", on_errors=errors.append)
            assert (await box.exec("echo beside; cd /")).output == "beside\n"
            assert await program.read() == b"sub\n"
            writing = asyncio.create_task(program.write(data))
            back = b""
            while len(back) < len(data):
                back += await program.read()
            await writing
            assert back == data
            program.end_input()
            assert await program.read() == b""
            assert errors == [b"1\n"]
            await program.kill()
            await must_fail(SandboxError, program.read())
            await must_fail(SandboxError, program.write(b"x"))

    async def test_a_killed_program_leaves_nothing(self, tmp_path: Path) -> None:
        marks = [unique_seconds() for _ in range(4)]
        async with self.sandbox(tmp_path) as box:
            await box.exec(f"sleep {marks[3]} &")
            tree = f"sleep {marks[0]} & (setsid sh -c '(sleep {marks[1]}; :) &' &); exec sleep {marks[2]}"
            program = await box.spawn(tree, on_errors=lambda data: None)
            for mark in marks:
                await wait_until_present(mark)
            reading = asyncio.create_task(program.read())
            await asyncio.sleep(0)
            await program.kill()
            await must_fail(SandboxError, reading)
            assert [bool(processes_with(mark)) for mark in marks] == [False, False, False, True]
            await program.kill()

    async def test_a_program_can_be_interrupted(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            program = await box.spawn(
                "trap 'echo caught; exit' INT; echo up; while :; do sleep 0.05; done",
                on_errors=lambda data: None,
            )
            assert await program.read() == b"up\n"
            program.interrupt()
            assert await program.read() == b"caught\n"
            assert await program.read() == b""

    async def test_a_program_survives_a_run_and_ends_with_the_sandbox(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.sandbox(tmp_path) as box:
            program = await box.spawn(f"sleep {mark} & exec cat", on_errors=lambda data: None)
            await wait_until_present(mark)
            assert await box.run("true", **Said().hears()) == 0
            await program.write(b"on")
            assert await program.read() == b"on"
            assert processes_with(mark)
            await box.close()
            assert not processes_with(mark)
            await must_fail(SandboxError, program.read())
            await must_fail(SandboxError, box.spawn("true", on_errors=lambda data: None))

    async def test_a_cancelled_start_of_a_program_leaves_nothing(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.sandbox(tmp_path) as box:
            await (await box.open_console()).close()
            before = open_descriptors()
            for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016):
                spawning = asyncio.create_task(box.spawn(f"exec sleep {mark}", on_errors=lambda data: None))
                opening = asyncio.create_task(box.open_console())
                await asyncio.sleep(delay_s)
                spawning.cancel()
                opening.cancel()
                program, console = await asyncio.gather(spawning, opening, return_exceptions=True)
                if not isinstance(program, BaseException):
                    await program.kill()
                if not isinstance(console, BaseException):
                    await console.close()
            assert not processes_with(mark)
            assert open_descriptors() <= before
            assert (await box.exec("echo on")).output == "on\n"

    async def test_a_program_that_ends_at_once(self, tmp_path: Path) -> None:
        errors: list[bytes] = []
        async with self.sandbox(tmp_path) as box:
            for command in ("exec /no/such/program", "exit 3", "echo 'open", ""):
                program = await box.spawn(command, on_errors=errors.append)
                assert await program.read() == b""
                await must_fail(SandboxError, program.write(b"x" * (1 << 20)))
            assert b"/no/such/program" in b"".join(errors)

    async def test_a_console_keeps_its_own_directory_and_jobs(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.sandbox(tmp_path) as box:
            console, other = await box.open_console(), await box.open_console()
            await console.begin(f"mkdir c; cd c; export A=1; sleep {mark} &", timeout_s=20)
            assert (await console.look(20)).exit_code == 0
            await console.begin("echo ${PWD##*/} $A; (exit 7)", timeout_s=20)
            assert await console.look(20) == ConsoleState(output="c 1\n", exit_code=7)
            await other.begin('echo "[$A]"', timeout_s=20)
            assert (await other.look(20)).output == "[]\n"
            assert (await box.exec('echo "[$A]"')).output == "[]\n"
            await wait_until_present(mark)
            await console.close()
            assert not processes_with(mark)
            await must_fail(SandboxError, console.begin("true", timeout_s=5))

    async def test_a_command_of_a_console_takes_input(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            console = await box.open_console()
            await console.begin("read -r x; echo got $x; cat; echo done", timeout_s=60, takes_input=True)
            await must_fail(Conflict, console.begin("true", timeout_s=5))
            assert await console.look(0.05) == ConsoleState(output="", running=True)
            console.type(b"one\n")
            output = ""
            while "got one" not in output:
                output += (await console.look(0.05)).output
            console.type(b"two\n" * 100_000)
            console.end_input()
            state = await console.look(20)
            assert (state.exit_code, state.output[-9:]) == (0, "two\ndone\n")
            assert state.elided_bytes > 300_000
            await console.begin("cat", timeout_s=20)
            assert await console.look(20) == ConsoleState(output="", exit_code=0)

    async def test_a_console_is_interrupted_or_times_out_and_goes_on(self, tmp_path: Path) -> None:
        marks = [unique_seconds(), unique_seconds()]
        async with self.sandbox(tmp_path) as box:
            await self.needs_bash(box)
            console = await box.open_console()
            await console.begin(f"sleep {marks[0]}; touch never", timeout_s=60)
            await wait_until_present(marks[0])
            console.interrupt()
            assert (await console.look(20)).exit_code == 130
            await console.begin(f"echo before; sleep {marks[1]}; touch never", timeout_s=1.0)
            assert await console.look(20) == ConsoleState(output="before\n", timed_out=True)
            await wait_until_gone(marks[1])
            await console.begin("ls", timeout_s=20)
            assert await console.look(20) == ConsoleState(output="", exit_code=0)

    async def test_a_cancelled_look_kills_the_command(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.sandbox(tmp_path) as box:
            console = await box.open_console()
            await console.begin(f"sleep {mark}", timeout_s=60)
            await wait_until_present(mark)
            looking = asyncio.create_task(console.look(60))
            await asyncio.sleep(0.01)
            looking.cancel()
            await must_fail(asyncio.CancelledError, looking)
            await wait_until_gone(mark)
            await console.begin("echo on", timeout_s=20)
            assert (await console.look(20)).output == "on\n"
