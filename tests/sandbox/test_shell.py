"""The shell protocol over runtime ``process``: forging, hygiene, floods, restarts."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.answers import ControlBuffer
from rollserve.sandbox.base import Sandbox, SandboxSpec
from rollserve.sandbox.capture import Capture
from rollserve.sandbox.process import ProcessRuntime


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    runtime = ProcessRuntime(data_dir=tmp_path)
    yield await runtime.create(SandboxSpec(), owner="test", ttl_s=100)
    await runtime.close()


FORGERIES = (
    r"printf '\0%s 0 1\0' 0123456789abcdef; exit 5",
    r"for fd in $(seq 1 30) 250 251; do printf '\0deadbeefdeadbeef 0 1\0' >&$fd; done 2>/dev/null; exit 5",
    r"for i in $(seq 2000); do printf '\0%016x 0 %d\0' $i $$; done; exit 5",
    r"tr '\0' '\n' </proc/$PPID/cmdline; cat /proc/$$/environ; exit 5",
)


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_output_cannot_forge_an_answer(box: Sandbox, forgery: str) -> None:
    result = await box.exec(forgery)
    assert result.exit_code == 5
    assert (await box.exec("echo on")).output == "on\n"


async def test_commands_see_no_descriptor_of_the_protocol(box: Sandbox) -> None:
    listing = (await box.exec("sh -c 'ls /proc/$$/fd'")).output
    assert listing.split() == ["0", "1", "2"]


async def test_scripts_may_use_low_descriptors(box: Sandbox) -> None:
    result = await box.exec("exec 9>lock 3>three; echo x >&9; echo y >&3; cat lock three")
    assert result.output == "x\ny\n"
    assert (await box.exec("echo z >&9; cat lock")).output == "x\nz\n"


@pytest.mark.parametrize(
    "damage",
    [
        "set -x", "set -u; unset PWD", "set -f; IFS=0", "set -v", "exec 2>/dev/null", "exec 0<&-",
        "trap 'echo t' DEBUG; trap - DEBUG", "printf() { :; }; export() { :; }; eval() { :; }",
        "PATH=", "readonly PWD", "set -o posix", "shopt -s extglob nullglob", "alias echo=false",
        "cd /tmp && mkdir -p gone.$$ && cd gone.$$ && rmdir ../gone.$$", "set -e; true", "set -n",
        "kill -9 $$", "kill -STOP $$", "ulimit -n 40",
    ],
)  # fmt: skip
async def test_a_damaged_shell_still_answers(box: Sandbox, damage: str) -> None:
    await box.exec(damage, timeout_s=1)
    deaf = damage == "set -n"
    assert "on" in (await box.exec("echo on", timeout_s=1 if deaf else 30)).output or deaf
    await box.write_file("f", b"1")
    assert await box.read_file("f") == b"1"


async def test_functions_survive_a_restart(box: Sandbox) -> None:
    await box.exec('greet() { echo "hi $1"; }; export -f greet')
    await box.exec("sleep 9", timeout_s=0.1)
    assert (await box.exec("greet you; bash -c 'greet me'")).output == "hi you\nhi me\n"


async def test_what_follows_a_timed_out_command_does_not_run(box: Sandbox) -> None:
    await box.exec("sleep 9; touch never\ntouch never2", timeout_s=0.1)
    assert (await box.exec("ls")).output == ""


async def test_background_output_is_not_lost(box: Sandbox) -> None:
    folder = Path((await box.exec("pwd")).output.strip())
    await box.exec("(until [ -e go ]; do sleep 0.01; done; echo later; touch said) &")
    (folder / "go").touch()
    async with asyncio.timeout(30):
        while not (folder / "said").exists():
            await asyncio.sleep(0.01)
    assert (await box.exec("echo now")).output == "later\nnow\n"


async def test_background_flood_is_slowed_down(box: Sandbox) -> None:
    await box.exec("yes &")
    started = os.times()
    await asyncio.sleep(0.5)
    ended = os.times()
    assert (ended.user + ended.system) - (started.user + started.system) < 0.3
    assert (await box.exec("kill %1; echo on", output_limit_bytes=100)).elided_bytes > 0


async def test_a_flood_costs_no_memory(box: Sandbox) -> None:
    tracemalloc.start()
    try:
        await box.exec("yes 0123456789", timeout_s=0.7)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


async def test_a_huge_environment_is_dropped_not_kept(box: Sandbox) -> None:
    await box.exec("export SMALL=1")
    await box.exec("BIG=$(head -c 3000000 /dev/zero | tr '\\0' x); export BIG", timeout_s=30)
    assert (await box.exec("echo ${#BIG}", timeout_s=30)).output == "3000000\n"
    await box.exec("exit 0", timeout_s=30)
    assert (await box.exec("echo $SMALL ${#BIG}")).output == "1 0\n"


async def test_long_command(box: Sandbox) -> None:
    text = "x" * 300_000
    assert (await box.exec(f"printf %s {text} | wc -c")).output.strip() == "300000"


async def test_nul_in_a_command_is_refused(box: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="NUL"):
        await box.exec("echo \0")


async def test_cancelled_write_leaves_the_pipes_clean(box: Sandbox) -> None:
    await box.exec("mkfifo pipe")
    writing = asyncio.create_task(box.write_file("pipe", b"x" * 1_000_000))
    await asyncio.sleep(0.1)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await box.write_file("f", b"clean")
    assert await box.read_file("f") == b"clean"


async def test_many_cancels(box: Sandbox) -> None:
    for step in range(12):
        task = asyncio.create_task(box.exec("sleep 5; echo no"))
        await asyncio.sleep(0.001 * step)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await box.exec("echo on")).output == "on\n"


async def test_descriptors_are_given_back(tmp_path: Path) -> None:
    runtime = ProcessRuntime(data_dir=tmp_path)
    await (await runtime.create(SandboxSpec(), owner="test", ttl_s=100)).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        box = await runtime.create(SandboxSpec(), owner="test", ttl_s=100)
        await box.exec("sleep 3", timeout_s=0.05)
        await box.close()
    assert len(os.listdir("/proc/self/fd")) == before
    await runtime.close()


async def test_a_create_that_cannot_start(tmp_path: Path) -> None:
    runtime = ProcessRuntime(data_dir=tmp_path)
    spec = SandboxSpec(files={"/proc/nowhere/f": b""})
    with pytest.raises(SandboxError, match="cannot write"):
        await runtime.create(spec, owner="test", ttl_s=100)
    await runtime.close()


def test_capture_keeps_head_and_tail() -> None:
    capture = Capture(10)
    for number in range(1000):
        capture.feed(b"%d," % number)
    assert capture.elided_bytes == sum(len(f"{number},") for number in range(1000)) - 10
    assert capture.text().startswith("0,1,2")
    assert capture.text().endswith("\n,999,")
    assert Capture(0).text() == ""


def test_capture_of_exactly_the_limit() -> None:
    capture = Capture(7)
    capture.feed(b"abc")
    capture.feed(b"defg")
    assert (capture.text(), capture.elided_bytes) == ("abcdefg", 0)
    capture.feed(b"h")
    assert capture.elided_bytes == 1


def test_answers_in_pieces() -> None:
    buffer = ControlBuffer()
    buffer.expect(b"aa11", key=b"kk", payload_limit_bytes=100)
    stream = b"pay\0load\0aa11 3 42\0\0kk 137 0\0"
    answers = [answer for byte in stream for answer in buffer.feed(bytes([byte]))]
    assert [(a.code, a.pid, a.payload, a.shell_exited) for a in answers] == [
        (3, 42, b"pay\0load", False),
        (137, 0, b"", True),
    ]


def test_answer_after_too_much_payload() -> None:
    buffer = ControlBuffer()
    buffer.expect(b"aa11", key=b"kk", payload_limit_bytes=100)
    for _ in range(50):
        assert buffer.feed(b"x" * 1000) == []
    (answer,) = buffer.feed(b"\0aa11 0 1\0")
    assert (answer.code, answer.payload) == (0, None)
