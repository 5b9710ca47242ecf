"""The tools of a sandbox, in real ones."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollserve.errors import SandboxError
from rollserve.sandbox.base import Sandbox, SandboxSpec
from rollserve.sandbox.process import ProcessRuntime
from rollserve.sandbox.tools.base import Tool, ToolResult
from rollserve.sandbox.tools.bash import MAX_SESSIONS, BashTool
from rollserve.sandbox.tools.editor import MAX_FILE_BYTES, EditorTool
from rollserve.sandbox.tools.python import PythonTool
from rollserve.sandbox.tools.search import SearchTool
from rollserve.testing.runtime_probes import (
    processes_with,
    unique_seconds,
    wait_until_gone,
    wait_until_present,
)

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    runtime = ProcessRuntime(data_dir=tmp_path)
    yield await runtime.create(SandboxSpec(), owner="test", ttl_s=100)
    await runtime.close()


@pytest.fixture
async def bash(box: Sandbox) -> AsyncIterator[BashTool]:
    tool = BashTool(box, 30)
    yield tool
    await tool.close()


@pytest.fixture
async def python(box: Sandbox) -> AsyncIterator[PythonTool]:
    tool = PythonTool(box, 30)
    yield tool
    await tool.close()


async def say(tool: Tool, **arguments: Any) -> str:
    return (await tool.call(arguments)).text


def bare(tmp_path: Path, *programs: str) -> ProcessRuntime:
    """A runtime whose commands find these programs and no others."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in programs:
        found = shutil.which(name, path=PATH)
        if found is None:
            pytest.skip(f"this machine has no {name}")
        (tools / name).symlink_to(found)
    return ProcessRuntime(data_dir=tmp_path / "data", path=str(tools))


# -- bash ---------------------------------------------------------------------------------------


async def test_bash_keeps_directory_environment_and_jobs(bash: BashTool) -> None:
    assert await say(bash, command="mkdir d; cd d; export A=1; (sleep 0.1; echo late; touch said) &") == ""
    assert await say(bash, command="echo ${PWD##*/} $A; exit_code() { return 3; }; exit_code") == (
        "d 1\n[exit code 3]"
    )
    assert "late" in await say(bash, command="until [ -e said ]; do sleep 0.01; done; echo now")


async def test_bash_sessions_are_apart(bash: BashTool) -> None:
    await bash.call({"command": "export A=1", "session": "one"})
    assert await say(bash, command='echo "[$A]"', session="two") == "[]"
    assert await say(bash, command='echo "[$A]"', session="one") == "[1]"
    for number in range(MAX_SESSIONS - 2):
        await bash.call({"command": "true", "session": f"more{number}"})
    refused = await bash.call({"command": "true", "session": "too many"})
    assert refused.is_error
    assert "more0" in refused.text


async def test_bash_times_out_and_keeps_the_shell(bash: BashTool) -> None:
    await bash.call({"command": "cd /tmp"})
    result = await bash.call({"command": "echo begun; sleep 60; echo never", "timeout_s": 1})
    assert result == ToolResult(text="begun\n[killed after 1 s]", is_error=True)
    assert await say(bash, command="pwd") == "/tmp"


async def test_bash_speaks_to_a_waiting_program(bash: BashTool) -> None:
    first = await bash.call({"command": "read -r x; echo got $x; cat; echo end", "wait_s": 0.05})
    assert first == ToolResult(text="[still running in shell 'main']")
    busy = await bash.call({"command": "true"})
    assert busy.is_error
    assert "is running" in busy.text
    said = await say(bash, input="hello\n", wait_s=0.1)
    while said == "[still running in shell 'main']":
        said = await say(bash, wait_s=0.1)
    assert said == "got hello\n[still running in shell 'main']"
    assert await say(bash, input="more\n\x04", wait_s=20) == "more\nend"
    nothing = await bash.call({"input": "x\n"})
    assert nothing == ToolResult(text="[nothing is running in shell 'main']", is_error=True)


async def test_bash_input_given_with_the_command_ends(bash: BashTool) -> None:
    assert await say(bash, command="cat; echo end", input="one\n") == "one\nend"
    assert await say(bash, command="cat; echo end") == "end"


async def test_bash_interrupts(bash: BashTool) -> None:
    mark = unique_seconds()
    await bash.call({"command": f"trap 'echo caught' EXIT; sleep {mark}; echo never", "wait_s": 0})
    await wait_until_present(mark)
    result = await bash.call({"interrupt": True, "wait_s": 20})
    assert result.is_error
    assert result.text.endswith("[exit code 130]")
    assert "never" not in result.text
    assert await say(bash, command="echo on") == "on"


async def test_bash_tells_of_a_command_that_ended_meanwhile(bash: BashTool) -> None:
    await bash.call({"command": "sleep 0.1; echo done; exit 4", "wait_s": 0})
    async with asyncio.timeout(30):
        while bash._sessions["main"].console.running:
            await asyncio.sleep(0.01)
    assert await say(bash, command="echo next") == "[before] done\n[exit code 4]\nnext"


async def test_bash_restarts_with_nothing_left(bash: BashTool) -> None:
    mark = unique_seconds()
    await bash.call({"command": f"export A=1; nohup sleep {mark} >/dev/null &"})
    await wait_until_present(mark)
    assert await say(bash, restart=True) == "[shell 'main' restarted]"
    assert not processes_with(mark)
    assert await say(bash, command='echo "[$A]"') == "[]"


async def test_bash_output_is_bounded(bash: BashTool) -> None:
    text = await say(bash, command="seq 1 1000000")
    assert len(text) < 70_000
    assert text.startswith("1\n2\n")
    assert text.endswith("\n1000000")
    assert "bytes elided" in text


async def test_bash_hears_of_what_no_shell_can_read(bash: BashTool) -> None:
    result = await bash.call({"command": "a\0b"})
    assert result.is_error
    assert "NUL" in result.text


async def test_a_cancelled_bash_call_kills_its_command(bash: BashTool) -> None:
    mark = unique_seconds()
    call = asyncio.create_task(bash.call({"command": f"sleep {mark}"}))
    await wait_until_present(mark)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await wait_until_gone(mark)
    assert await say(bash, command="echo on") == "on"


async def test_bash_in_an_image_that_has_only_sh(tmp_path: Path) -> None:
    runtime = bare(tmp_path, "sh", "cat", "sleep")
    box = await runtime.create(SandboxSpec(), owner="test", ttl_s=100)
    tool = BashTool(box, 30)
    assert await say(tool, command="cd /tmp; export A=1") == ""
    assert await say(tool, command='echo "$PWD $A ${BASH_VERSION-no}"') == "/tmp 1 no"
    assert await say(tool, command="cat", input="in\n") == "in"
    assert await say(tool, command="sleep 9", timeout_s=0.2) == "[killed after 0.2 s]"
    await tool.call({"command": "sleep 60", "wait_s": 0})
    assert (await say(tool, interrupt=True, wait_s=0.1)).endswith("[Ctrl-C did not end it; `restart` does]")
    assert await say(tool, restart=True, command="echo anew") == "anew"
    await runtime.close()


async def test_a_gone_sandbox_is_no_tool_error(box: Sandbox, bash: BashTool, python: PythonTool) -> None:
    await bash.call({"command": "true"})
    await python.call({"code": "1"})
    await box.close()
    for call in (
        bash.call({"command": "true"}),
        python.call({"code": "1"}),
        EditorTool(box).call({"command": "view", "path": "f"}),
        SearchTool(box, 5).call({"pattern": "x"}),
    ):
        with pytest.raises(SandboxError):
            await call


async def test_calls_at_once_do_not_mix(bash: BashTool, python: PythonTool) -> None:
    told = await asyncio.gather(*(say(bash, command=f"echo {n}", session=f"s{n % 4}") for n in range(12)))
    assert {text for text in told if "running" not in text} <= {str(n) for n in range(12)}
    assert len(bash._sessions) == 4
    codes = [say(python, code=f"print({n}); {n}") for n in range(12)]
    assert await asyncio.gather(*codes) == [f"{n}\n{n}" for n in range(12)]


# -- python -------------------------------------------------------------------------------------


async def test_python_keeps_names_and_shows_values(python: PythonTool) -> None:
    assert await say(python, code="x = 41") == ""
    assert await say(python, code="import sys\nprint('out'); print('err', file=sys.stderr)\nx + 1") == (
        "out\nerr\n42"
    )
    assert await say(python, code="_ + 1") == "43"
    assert await say(python, code="x;") == ""
    assert await say(python, code="import os; os.system('echo from a child');") == "from a child"


async def test_python_errors_show_the_users_frames_alone(python: PythonTool) -> None:
    await python.call({"code": "def f(n):\n    return 1 / n"})
    result = await python.call({"code": "x = 1\ntry:\n    f(0)\nexcept ZeroDivisionError:\n    {}['k']"})
    assert result.is_error
    assert result.text.count("Traceback") == 2
    assert 'File "<cell 1>", line 2, in f' in result.text
    assert "return 1 / n" in result.text
    assert result.text.endswith("KeyError: 'k'")
    assert "<string>" not in result.text
    broken = await python.call({"code": "if True print(1)"})
    assert "SyntaxError" in broken.text
    assert "ast.py" not in broken.text
    assert await say(python, code="x") == "1"
    assert "SystemExit" in await say(python, code="import sys; sys.exit(3)")


async def test_python_awaits_at_the_top(python: PythonTool) -> None:
    code = "import asyncio\nasync def g():\n    await asyncio.sleep(0)\n    return 7\nawait g()"
    assert await say(python, code=code) == "7"


async def test_python_is_interrupted_and_keeps_names(python: PythonTool) -> None:
    await python.call({"code": "x = 5"})
    result = await python.call({"code": "print('begun')\nimport time; time.sleep(60)", "timeout_s": 1})
    assert result.is_error
    assert result.text.startswith("begun\n")
    assert "KeyboardInterrupt" in result.text
    assert result.text.endswith("[interrupted after 1 s; names are kept]")
    assert await say(python, code="x") == "5"


async def test_python_that_heeds_no_interrupt_is_lost(
    python: PythonTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollserve.sandbox.tools.python.GRACE_S", 0.2)
    await python.call({"code": "x = 5"})
    deaf = "print('deaf')\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    result = await python.call({"code": deaf, "timeout_s": 1})
    assert result.is_error
    assert result.text.startswith("deaf\n[killed after 1 s")
    assert "NameError" in await say(python, code="x")


async def test_python_that_dies_begins_anew(python: PythonTool) -> None:
    result = await python.call({"code": "import os; print('bye'); os._exit(3)"})
    assert result.is_error
    assert result.text.startswith("bye\n[the interpreter ended")
    assert await say(python, code="1 + 1") == "2"
    await python.call({"code": "x = 1"})
    assert await say(python, restart=True) == "[restarted]"
    assert "NameError" in await say(python, code="x")


async def test_python_survives_hostile_cells(python: PythonTool) -> None:
    for code in (
        "import sys; sys.stdout.close()",
        "import os; os.close(2)",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "__builtins__ = None",
        "import os\nif os.fork() == 0: raise KeyError('child')",
        "class R:\n    def __repr__(self): raise ValueError('no repr')\nR()",
        "input()",
    ):
        await python.call({"code": code})
    await python.call({"restart": True})
    assert await say(python, code="1 + 1") == "2"


async def test_python_output_and_values_are_bounded(python: PythonTool) -> None:
    text = await say(python, code="for i in range(200_000): print(i)\n'v' * 10**6")
    assert len(text) < 100_000
    assert "bytes elided" in text
    assert "characters left out" in text


async def test_python_plots_come_as_png(tmp_path: Path) -> None:
    """With a stand-in for matplotlib: the image decides whether there is one."""
    fake = (
        "class Figure:\n    def savefig(self, file, format): file.write(b'PNG' + format.encode())\n"
        "open_ones = [1, 2]\ndef get_fignums(): return list(open_ones)\n"
        "def figure(number): return Figure()\ndef close(which): open_ones.clear()\n"
    )
    files = {"matplotlib/__init__.py": b"", "matplotlib/pyplot.py": fake.encode()}
    runtime = ProcessRuntime(data_dir=tmp_path)
    box = await runtime.create(SandboxSpec(files=files), owner="test", ttl_s=100)
    tool = PythonTool(box, 30)
    result = await tool.call({"code": "import matplotlib.pyplot as plt"})
    assert [each.media_type for each in result.attachments] == ["image/png"] * 2
    assert base64.b64decode(result.attachments[0].base64) == b"PNGpng"
    paths = re.findall(r"\[figure: (.*)\]", result.text)
    assert [Path(path).name for path in paths] == ["1.png", "2.png"]
    assert [await box.read_file(path) for path in paths] == [b"PNGpng"] * 2
    assert (await tool.call({"code": "1"})).attachments == ()
    again = "plt.open_ones.append(3)"
    (third,) = re.findall(r"\[figure: (.*)\]", (await tool.call({"code": again})).text)
    assert Path(third).name == "3.png"
    lost = await tool.call({"code": f"import os; os.environ['TMPDIR'] = '/proc/none'; {again}"})
    assert lost.text == "[figure: it could not be written to a file]"
    assert len(lost.attachments) == 1
    await runtime.close()


async def test_an_image_without_python_is_named(tmp_path: Path) -> None:
    runtime = bare(tmp_path, "sh", "cat")
    box = await runtime.create(SandboxSpec(), owner="test", ttl_s=100)
    result = await PythonTool(box, 5).call({"code": "1"})
    assert result == ToolResult(text="error: this sandbox has no python3", is_error=True)
    await runtime.close()


async def test_a_cancelled_python_call_keeps_names(python: PythonTool) -> None:
    await python.call({"code": "x = 5"})
    call = asyncio.create_task(python.call({"code": "import time; time.sleep(60)"}))
    await asyncio.sleep(0.1)  # whenever it comes
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await say(python, code="x") == "5"


# -- str_replace_editor -------------------------------------------------------------------------


async def test_editor_views_with_numbers_and_ranges(box: Sandbox) -> None:
    tool = EditorTool(box)
    await box.write_file("a/f.txt", b"one\ntwo\nthree\nfour")
    assert await say(tool, command="view", path="a/f.txt", view_range=[2, 3]) == "     2\ttwo\n     3\tthree"
    assert (await say(tool, command="view", path="a/f.txt", view_range=[3, -1])).endswith("     4\tfour")
    assert "lines 1 to 4" in await say(tool, command="view", path="a/f.txt", view_range=[9, 10])
    listing = await say(tool, command="view", path="/workspace")
    assert listing.splitlines()[1:] == ["a", "a/f.txt"]
    assert await say(tool, command="view", path="no") == "error: there is no no"


async def test_editor_replaces_exactly_once(box: Sandbox) -> None:
    tool = EditorTool(box)
    await box.write_file("f", b"a = 1\nb = 2\na = 1\n\tc = 3\n")
    twice = await say(tool, command="str_replace", path="f", old_str="a = 1", new_str="a = 9")
    assert "occurs 2 times in f, at lines 1, 3" in twice
    assert "does not occur" in await say(tool, command="str_replace", path="f", old_str="nowhere")
    near = await say(tool, command="str_replace", path="f", old_str="    c = 3")
    assert "from line 4 on it is there with other white space" in near
    done = await say(tool, command="str_replace", path="f", old_str="b = 2\n", new_str="b = 5\nd = 6\n")
    assert "     2\tb = 5\n     3\td = 6" in done
    assert await box.read_file("f") == b"a = 1\nb = 5\nd = 6\na = 1\n\tc = 3\n"
    await say(tool, command="str_replace", path="f", old_str="d = 6\n")
    assert b"d = 6" not in await box.read_file("f")


async def test_editor_inserts_creates_and_takes_back(box: Sandbox) -> None:
    tool = EditorTool(box)
    assert await say(tool, command="create", path="x/f", file_text="one\nthree") == "x/f was created"
    await say(tool, command="insert", path="x/f", insert_line=1, new_str="two")
    await say(tool, command="insert", path="x/f", insert_line=3, new_str="four")
    await say(tool, command="insert", path="x/f", insert_line=0, new_str="zero\n")
    assert await box.read_file("x/f") == b"zero\none\ntwo\nthree\nfour\n"
    too_far = await say(tool, command="insert", path="x/f", insert_line=9, new_str="x")
    assert "has 5 lines" in too_far
    for expected in (b"one\ntwo\nthree\nfour\n", b"one\ntwo\nthree", b"one\nthree"):
        await say(tool, command="undo_edit", path="x/f")
        assert await box.read_file("x/f") == expected
    assert "was removed" in await say(tool, command="undo_edit", path="x/f")
    with pytest.raises(SandboxError):
        await box.read_file("x/f")
    assert "no edit of x/f" in await say(tool, command="undo_edit", path="x/f")


async def test_editor_leaves_modes_and_strange_bytes_alone(box: Sandbox) -> None:
    tool = EditorTool(box)
    await box.write_file("latin", b"caf\xe9 one\r\nend\r\n")
    await box.exec("chmod 755 latin")
    assert "caf\\xe9 one" in await say(tool, command="view", path="latin")
    assert "CRLF" in await say(tool, command="str_replace", path="latin", old_str="one\nend")
    await say(tool, command="str_replace", path="latin", old_str="one", new_str="two")
    assert await box.read_file("latin") == b"caf\xe9 two\r\nend\r\n"
    assert (await box.exec("stat -c %a latin")).output == "755\n"


async def test_editor_knows_what_it_can_not_edit(box: Sandbox) -> None:
    tool = EditorTool(box)
    await box.write_file("bin", b"\x7fELF\0\1")
    assert "binary file of 6 bytes" in await say(tool, command="view", path="bin")
    await box.exec(f"yes line | head -c {MAX_FILE_BYTES + 5} > huge")
    assert "give a `view_range`" in await say(tool, command="view", path="huge")
    part = await say(tool, command="view", path="huge", view_range=[500_001, 500_002])
    assert part == "500001\tline\n500002\tline"
    assert "too many" in await say(tool, command="str_replace", path="huge", old_str="x")
    assert "is a directory" in await say(tool, command="create", path="/tmp", file_text="")
    assert "needs `old_str`" in await say(tool, command="str_replace", path="bin")
    assert "cannot write" in await say(tool, command="create", path="/proc/x", file_text="x")


async def test_editor_needs_no_more_than_a_shell(tmp_path: Path) -> None:
    runtime = bare(tmp_path, "sh", "head", "mkdir", "wc", "find", "sort", "rm")
    box = await runtime.create(SandboxSpec(), owner="test", ttl_s=100)
    tool = EditorTool(box)
    await say(tool, command="create", path="d/f", file_text="one\n")
    await say(tool, command="str_replace", path="d/f", old_str="one", new_str="two")
    assert await say(tool, command="view", path="d/f") == "     1\ttwo"
    assert "d/f" in await say(tool, command="view", path=".")
    await runtime.close()


# -- search -------------------------------------------------------------------------------------

TREE = {
    "src/a.py": b"import os\nvalue = 42\n",
    "src/b.txt": b"value of B\n",
    ".git/config": b"value = hidden\n",
    "it's odd.py": b"VALUE = 1\n",
    "data.bin": b"value\0\1",
}


@pytest.mark.parametrize("programs", [None, ("sh", "grep", "find", "head"), ("sh", "busybox", "head")])
async def test_search_finds_lines_and_files(tmp_path: Path, programs: tuple[str, ...] | None) -> None:
    runtime = ProcessRuntime(data_dir=tmp_path) if programs is None else bare(tmp_path, *programs)
    if programs and "busybox" in programs:
        for name in ("grep", "find"):
            (tmp_path / "bin" / name).symlink_to((tmp_path / "bin" / "busybox").resolve())
    box = await runtime.create(SandboxSpec(files=TREE), owner="test", ttl_s=100)
    tool = SearchTool(box, 20)
    found = sorted(
        line.partition("workspace/")[2] for line in (await say(tool, pattern="value")).splitlines()
    )
    assert found == ["src/a.py:2:value = 42", "src/b.txt:1:value of B"]
    odd = await say(tool, pattern="value", ignore_case=True, glob="*.py", max_results=1)
    assert odd.endswith("[more than 1 results]")
    files = (await say(tool, glob="*.py")).splitlines()
    assert sorted(name.partition("workspace/")[2] for name in files) == ["it's odd.py", "src/a.py"]
    assert (await say(tool, pattern="B$", path="src/b.txt")).endswith("src/b.txt:1:value of B")
    assert await say(tool, pattern="no such thing") == "[nothing found]"
    for wrong in ({"pattern": "(("}, {"path": "no/such"}, {}):
        assert (await tool.call({"pattern": "x", **wrong} if wrong else {})).is_error
    await runtime.close()
