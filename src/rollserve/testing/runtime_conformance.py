"""What every sandbox runtime must do: subclass ``RuntimeConformance`` in a test module and run pytest.

::

    class TestMyRuntime(RuntimeConformance):
        factory = "my_package.my_runtime:MyRuntime"  # called with data_dir=Path

The checks are plain ``async def`` methods that take pytest's ``tmp_path``. Those of isolation and of
limits run where the runtime's report claims them. Processes are looked for on the host through
``/proc`` by a number that only the check knows.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from rollserve.errors import Conflict, InvalidInput, SandboxError, TooLarge
from rollserve.sandbox.base import ConsoleState, SandboxLimits, SandboxSpec, SpareMaker
from rollserve.sandbox.transfer import download, upload
from rollserve.testing.runtime_probes import (
    OWNER,
    TTL_S,
    RuntimeChecks,
    Said,
    accepts,
    count_ticks,
    dial,
    greeting,
    host_has,
    host_socket,
    must_fail,
    open_descriptors,
    open_folder,
    processes_with,
    processes_with_environment,
    ticks_of,
    unique_seconds,
    wait_until_gone,
    wait_until_present,
)

_WORKER = """
import asyncio, sys
from pathlib import Path
from rollserve.testing.runtime_probes import load_runtime, OWNER
from rollserve.sandbox.base import SandboxSpec

async def main():
    runtime = load_runtime(sys.argv[1], Path(sys.argv[2]))
    sandbox = await runtime.create(SandboxSpec(), owner=OWNER, ttl_s=600)
    await sandbox.exec(sys.argv[3])
    print("ready", flush=True)
    await sandbox.exec(sys.argv[4], timeout_s=600)

asyncio.run(main())
"""


class RuntimeConformance(RuntimeChecks):
    """Subclass as ``Test…``; set ``factory`` to ``module:callable``."""

    # -- commands -----------------------------------------------------------------------------

    async def test_report_names_the_runtime(self, tmp_path: Path) -> None:
        runtime = self.make(tmp_path)
        report = self.report_of(runtime)
        assert report.name == runtime.name
        assert {*report.enforces, *report.per_process} <= set(SandboxLimits.__struct_fields__)
        assert not {*report.enforces} & {*report.per_process}

    async def test_output_and_exit_code(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            result = await box.exec("echo out; echo err >&2; (exit 7)")
            assert (result.output, result.exit_code, result.timed_out) == ("out\nerr\n", 7, False)
            assert result.duration_s > 0

    async def test_order_of_stdout_and_stderr(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            result = await box.exec("for i in 1 2 3; do echo o$i; echo e$i >&2; done")
            assert result.output.split() == ["o1", "e1", "o2", "e2", "o3", "e3"]

    async def test_directory_and_environment_stay(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            await box.exec("mkdir -p sub && cd sub; export KEPT='a b'; local_one=x")
            result = await box.exec('echo "${PWD##*/}" "$KEPT" "$local_one"')
            assert result.output == "sub a b x\n"

    async def test_last_exit_code_is_visible(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            await box.exec("(exit 9)")
            assert (await box.exec("echo $?")).output == "9\n"

    async def test_starts_in_its_own_directory(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path, SandboxSpec(files={"here.txt": b"yes"})) as box:
            assert (await box.exec("cat here.txt")).output == "yes"

    async def test_environment_of_the_spec(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path, SandboxSpec(env={"TOKEN": 'it\'s "quoted" $x'})) as box:
            assert (await box.exec('printf %s "$TOKEN"')).output == 'it\'s "quoted" $x'

    async def test_environment_does_not_leak(self, tmp_path: Path) -> None:
        os.environ["ROLLSERVE_CONFORMANCE_SECRET"] = "leaked"
        try:
            async with self.sandbox(tmp_path) as box:
                assert "leaked" not in (await box.exec("env; cat /proc/1/environ /proc/$PPID/environ")).output
        finally:
            del os.environ["ROLLSERVE_CONFORMANCE_SECRET"]

    async def test_heredoc(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            result = await box.exec("cat <<'EOF' > f\n$x 'y' \"z\"\nEOF\ncat f; echo after")
            assert result.output == "$x 'y' \"z\"\nafter\n"

    async def test_several_lines_and_comments(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            assert (await box.exec("echo a\n# note\n\necho b # end")).output == "a\nb\n"

    async def test_empty_command(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            result = await box.exec("")
            assert (result.output, result.exit_code) == ("", 0)

    async def test_syntax_error(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            for broken in ("echo 'open", "if true; then", ")", "cat <<E\nno end", "{ echo x"):
                result = await box.exec(broken, timeout_s=30)
                assert not result.timed_out
            assert (await box.exec("echo fine")).output == "fine\n"

    async def test_stdin_is_empty(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            result = await box.exec('cat; read -r line; echo "[$line]"', timeout_s=30)
            assert (result.output, result.timed_out) == ("[]\n", False)

    async def test_exit_restarts_the_shell(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            await box.exec("mkdir d; cd d; export A=1")
            result = await box.exec("echo bye; exit 3; echo never")
            assert (result.output, result.exit_code) == ("bye\n", 3)
            assert (await box.exec("echo ${PWD##*/} $A")).output == "d 1\n"

    async def test_exec_replaces_the_shell(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            result = await box.exec("exec sh -c 'echo replaced; exit 4'")
            assert (result.output, result.exit_code) == ("replaced\n", 4)
            assert (await box.exec("echo on")).output == "on\n"

    async def test_errexit_ends_the_command_only(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            result = await box.exec("set -e; false; echo never")
            assert (result.output, result.exit_code) == ("", 1)
            assert (await box.exec("echo on")).output == "on\n"

    async def test_background_process_lives_on(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.sandbox(tmp_path) as box:
            started = await box.exec(f"sleep {mark} & echo started", timeout_s=30)
            assert (started.output, started.timed_out) == ("started\n", False)
            await box.exec("sleep 0.05")
            await box.exec("sleep 30", timeout_s=0.2)
            assert processes_with(mark)
        await wait_until_gone(mark)

    # -- output -------------------------------------------------------------------------------

    async def test_output_cap(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            result = await box.exec("seq 1 100000", output_limit_bytes=1000)
            assert result.output.startswith("1\n2\n")
            assert result.output.endswith("99999\n100000\n")
            assert result.elided_bytes == 588895 - 1000
            assert len(result.output) < 1200

    async def test_endless_output(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            ticks = asyncio.create_task(count_ticks())
            result = await box.exec("yes", timeout_s=1.0)
            ticks.cancel()
            assert result.timed_out
            assert result.elided_bytes > 1 << 20
            assert len(result.output) < 70000
            assert ticks_of(ticks) > 20, "the event loop was held up"
            assert (await box.exec("echo on")).output == "on\n"

    async def test_binary_output(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            assert (await box.exec("printf 'a\\377\\000\\303\\251'")).output == "a\\xff\x00é"

    # -- time-out and cancel ------------------------------------------------------------------

    async def test_timeout_keeps_the_shell(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.sandbox(tmp_path) as box:
            await box.exec("mkdir t; cd t; export A=1")
            command = f"echo before; sh -c 'sleep {mark}; :' | cat; touch never"
            result = await box.exec(command, timeout_s=0.5)
            assert (result.output, result.exit_code, result.timed_out) == ("before\n", None, True)
            await wait_until_gone(mark)
            assert (await box.exec("echo ${PWD##*/} $A; ls")).output == "t 1\n"

    async def test_timeout_of_a_busy_shell(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            await box.exec("trap '' TERM INT HUP; while :; do :; done", timeout_s=0.3)
            assert (await box.exec("echo on", timeout_s=30)).output == "on\n"

    async def test_cancel_kills_the_command(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.sandbox(tmp_path) as box:
            task = asyncio.create_task(box.exec(f"sleep {mark}; touch never"))
            await wait_until_present(mark)
            task.cancel()
            await must_fail(asyncio.CancelledError, task)
            assert not processes_with(mark)
            assert (await box.exec("echo on; ls")).output == "on\n"

    async def test_second_exec_waits(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            slow = asyncio.create_task(box.exec("sleep 0.3; echo slow > f"))
            await asyncio.sleep(0.05)
            assert (await box.exec("cat f")).output == "slow\n"
            await slow

    # -- programs -----------------------------------------------------------------------------

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

    # -- programs beside the shell, consoles --------------------------------------------------

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
            assert open_descriptors() == before
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
            await console.begin(f"echo before; sleep {marks[1]}; touch never", timeout_s=0.5)
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

    # -- the way out --------------------------------------------------------------------------

    async def test_what_is_inside_reaches_the_socket(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            await self.needs_bash(box)
            async with greeting(await box.listen()) as port:
                assert (await box.exec(dial(port), timeout_s=20)).output == "hello inside\n"

    async def test_the_socket_is_the_sandboxs_own(self, tmp_path: Path) -> None:
        async with self.isolated(tmp_path) as box, self.isolated(tmp_path) as other:
            await self.needs_bash(box)
            async with greeting(await box.listen()) as port, greeting(host_socket()) as outside:
                for sandbox, number in ((other, port), (box, outside), (other, outside)):
                    refused = await sandbox.exec(dial(number), timeout_s=20)
                    assert refused.exit_code != 0
                    assert "hello" not in refused.output
                error = await must_fail(OSError, asyncio.open_connection("127.0.0.1", port))
                assert isinstance(error, ConnectionRefusedError)

    async def test_the_socket_ends_with_the_sandbox(self, tmp_path: Path) -> None:
        async with self.runtime(tmp_path) as runtime:
            box = await runtime.create(SandboxSpec(), owner=OWNER, ttl_s=TTL_S)
            sock = await box.listen()
            await box.close()
            with sock:
                assert not accepts(sock)
            await must_fail(SandboxError, box.listen())

    async def test_a_mounted_folder_is_read_only(self, tmp_path: Path) -> None:
        with open_folder() as folder:
            (folder / "tool").write_text("from outside")
            spec = SandboxSpec(mounts={"/harness": str(folder)})
            async with self.runtime(tmp_path) as runtime:
                if not runtime.report().isolated:
                    error = await must_fail(InvalidInput, runtime.create(spec, owner=OWNER, ttl_s=TTL_S))
                    assert isinstance(error, InvalidInput)
                    assert error.field == "mounts"
                    return
                box = await runtime.create(spec, owner=OWNER, ttl_s=TTL_S)
                assert (await box.exec("cat /harness/tool")).output == "from outside"
                assert (await box.exec("echo x > /harness/tool || touch /harness/new")).exit_code != 0
                missing = SandboxSpec(mounts={"/harness": str(folder / "missing")})
                await must_fail(SandboxError, runtime.create(missing, owner=OWNER, ttl_s=TTL_S))

    # -- files --------------------------------------------------------------------------------

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
        async with self.sandbox(tmp_path, SandboxSpec(files={"big": data})) as box:
            assert await box.read_file("big") == data
            await box.write_file("again", data)
            assert (await box.exec("cmp big again && wc -c < again")).output.split() == [str(5 << 20)]

    async def test_many_files_of_the_spec(self, tmp_path: Path) -> None:
        files = {f"d{i % 3}/f{i}": bytes([i]) * i for i in range(40)}
        async with self.sandbox(tmp_path, SandboxSpec(files=files)) as box:
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
            for path in ("/proc/nowhere/f", "/dev/full/f"):
                await must_fail(SandboxError, upload(box, path, pieces()))
            await box.close()
            await must_fail(SandboxError, all_of("f"))

    # -- life ---------------------------------------------------------------------------------

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
                box = await runtime.create(SandboxSpec(), owner=OWNER, ttl_s=TTL_S)
                await box.exec(f"sleep {mark} &")
        assert not processes_with(mark)

    async def test_time_to_live(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.runtime(tmp_path) as runtime:
            box = await runtime.create(SandboxSpec(), owner=OWNER, ttl_s=1.0)
            await must_fail(SandboxError, box.exec(f"sleep {mark}"))
            await wait_until_gone(mark)

    async def test_cancelled_create_leaves_nothing(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        spec = SandboxSpec(env={"MARK": mark})
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
            spec = SandboxSpec(files={"sub/f": b"\0x"}, env={"TOKEN": "it's $x"})
            spare = await runtime.create_spare(SandboxSpec(), ttl_s=2.0)
            await spare.adopt(spec, ttl_s=TTL_S)
            await asyncio.sleep(2.1)
            assert (await spare.exec('printf %s "$TOKEN"')).output == "it's $x"
            assert await spare.read_file("sub/f") == b"\0x"
            await spare.exec("exit 3")
            assert (await spare.exec('printf %s "$TOKEN"')).output == "it's $x"
            gone = await runtime.create_spare(SandboxSpec(), ttl_s=TTL_S)
            await gone.close()
            await must_fail(SandboxError, gone.adopt(spec, ttl_s=TTL_S))

    async def test_many_at_once(self, tmp_path: Path) -> None:
        async with self.runtime(tmp_path) as runtime:

            async def one(number: int) -> str:
                box = await runtime.create(SandboxSpec(), owner=OWNER, ttl_s=TTL_S)
                return (await box.exec(f"echo {number} > n; cat n")).output

            outputs = await asyncio.gather(*(one(number) for number in range(50)))
            assert outputs == [f"{number}\n" for number in range(50)]

    async def test_reap_after_a_killed_worker(self, tmp_path: Path) -> None:
        marks = [unique_seconds(), unique_seconds()]
        async with self.runtime(tmp_path) as runtime:
            mine = await runtime.create(SandboxSpec(), owner=OWNER, ttl_s=TTL_S)
            daemon = f"(setsid sh -c '(sleep {marks[0]}; :) &' &)"
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _WORKER, self.factory, str(tmp_path), daemon, f"sleep {marks[1]}",
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

    # -- isolation ----------------------------------------------------------------------------

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
            box = await runtime.create(SandboxSpec(), owner=OWNER, ttl_s=TTL_S)
            assert (await box.exec("unshare -U true")).exit_code != 0

    # -- limits -------------------------------------------------------------------------------

    async def test_limit_of_processes(self, tmp_path: Path) -> None:
        async with self.limited(tmp_path, "processes", SandboxLimits(processes=20)) as box:
            mark = unique_seconds()
            bomb = f"i=0; while [ $i -lt 60 ]; do sleep {mark} & i=$((i+1)); done; wait"
            running = asyncio.create_task(box.exec(bomb, timeout_s=60))
            await wait_until_present(mark)
            await asyncio.sleep(1.0)
            assert 10 < len(processes_with(mark)) < 20
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
