"""The shell of a sandbox: commands, their output, time-outs and cancels."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rollserve.sandbox.base import SandboxLimits
from rollserve.testing.runtime_probes import (
    RuntimeChecks,
    Ticks,
    must_fail,
    processes_with,
    unique_seconds,
    wait_until_gone,
    wait_until_present,
)


class ShellChecks(RuntimeChecks):
    # -- commands ----------------------------------------------------------------------------------

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
        async with self.sandbox(tmp_path, self.spec(files={"here.txt": b"yes"})) as box:
            assert (await box.exec("cat here.txt")).output == "yes"

    async def test_environment_of_the_spec(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path, self.spec(env={"TOKEN": 'it\'s "quoted" $x'})) as box:
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

    # -- output ------------------------------------------------------------------------------------

    async def test_output_cap(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            result = await box.exec("seq 1 100000", output_limit_bytes=1000)
            assert result.output.startswith("1\n2\n")
            assert result.output.endswith("99999\n100000\n")
            assert result.elided_bytes == 588895 - 1000
            assert len(result.output) < 1200

    async def test_endless_output(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            ticks = Ticks()
            ticking = asyncio.create_task(ticks.go_on())
            result = await box.exec("yes", timeout_s=1.0)
            ticking.cancel()
            assert result.timed_out, result
            assert result.elided_bytes > 1 << 20
            assert len(result.output) < 70000
            assert ticks.a_second() > 20, "the event loop was held up"
            assert (await box.exec("echo on")).output == "on\n"

    async def test_binary_output(self, tmp_path: Path) -> None:
        async with self.sandbox(tmp_path) as box:
            assert (await box.exec("printf 'a\\377\\000\\303\\251'")).output == "a\\xff\x00é"

    # -- time-out and cancel -----------------------------------------------------------------------

    async def test_timeout_keeps_the_shell(self, tmp_path: Path) -> None:
        mark = unique_seconds()
        async with self.sandbox(tmp_path) as box:
            await box.exec("mkdir t; cd t; export A=1")
            command = f"echo before; sh -c 'sleep {mark}; :' | cat; touch never"
            result = await box.exec(command, timeout_s=1.0)
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
