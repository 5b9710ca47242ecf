"""What runs is what was hashed: caches, edits at bad moments, and zygotes that are lost."""

from __future__ import annotations

import hashlib
import os
import py_compile
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.errors import InfrastructureFailure
from rollserve.sandbox.tools import ToolResult
from rollserve.usercode import params
from rollserve.usercode.base import CodeInfo, Role, Use
from rollserve.usercode.hosts import ZygoteHosts

SECOND = 1_700_000_000
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"


@pytest.fixture
async def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ZygoteHosts]:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    hosts = ZygoteHosts(code_dir=tmp_path, max_hosts=8)
    yield hosts
    await hosts.close()


def write(file: Path, text: str, moment: int = 0) -> str:
    """Within one second. The version that is to be recorded."""
    file.write_text(text)
    os.utime(file, ns=(SECOND * 10**9 + moment, SECOND * 10**9 + moment))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def says(word: str) -> str:
    return f"def f() -> str:\n    return {word!r}\n"


async def tool(hosts: ZygoteHosts) -> CodeInfo:
    return await hosts.describe("mine:f", Role.TOOL, field="tools.0")


async def once(hosts: ZygoteHosts, info: CodeInfo) -> str:
    order = params.RunTool(path="mine:f", arguments_json=b"{}", sandbox_id=None)
    async with hosts.open(Use.LEAF, handlers={}, log=lambda line: None, code=(info,)) as host:
        return (await host.call("tool", order, ToolResult, timeout_s=30.0)).text


async def lose_zygote(hosts: ZygoteHosts, info: CodeInfo) -> None:
    """As by the system when memory runs out."""
    order = params.RunFunction(path="os:getppid", arguments_json=b"{}")
    async with hosts.open(Use.LEAF, handlers={}, log=lambda line: None, code=(info,)) as host:
        pid = int((await host.call("function", order, params.Json, timeout_s=30.0)).data)
        os.kill(pid, signal.SIGKILL)
        await host.ended


async def test_an_edit_within_the_second_runs(hosts: ZygoteHosts, tmp_path: Path) -> None:
    first = write(tmp_path / "mine.py", says("one"))
    old = await tool(hosts)
    assert (old.version, await once(hosts, old)) == (first, "one")
    second = write(tmp_path / "mine.py", says("two"), 1)
    new = await tool(hosts)
    assert (new.version, await once(hosts, new)) == (second, "two")
    assert not (tmp_path / "__pycache__").exists()


async def test_a_helper_edited_within_the_second_runs(hosts: ZygoteHosts, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    helper = tmp_path / "package" / "words.py"
    write(tmp_path / "mine.py", "from package import words\ndef f() -> str:\n    return words.WORD\n")
    write(helper, "WORD = 'one'\n")
    assert await once(hosts, await tool(hosts)) == "one"
    write(helper, "WORD = 'two'\n", 1)
    assert await once(hosts, await tool(hosts)) == "two"


async def test_a_cache_that_is_there_is_not_read(hosts: ZygoteHosts, tmp_path: Path) -> None:
    write(tmp_path / "mine.py", says("old"))
    py_compile.compile(str(tmp_path / "mine.py"))
    version = write(tmp_path / "mine.py", says("new"))
    info = await tool(hosts)
    assert (info.version, await once(hosts, info)) == (version, "new")


async def test_code_with_threads_that_was_edited_is_not_run_as_the_old(
    hosts: ZygoteHosts, tmp_path: Path
) -> None:
    write(tmp_path / "mine.py", THREAD + says("one"))
    old = await tool(hosts)
    assert await once(hosts, old) == "one"
    second = write(tmp_path / "mine.py", THREAD + says("two"), 1)
    with pytest.raises(InfrastructureFailure, match="has changed meanwhile"):
        await once(hosts, old)
    new = await tool(hosts)
    assert (new.version, await once(hosts, new)) == (second, "two")


async def test_another_file_that_was_edited_leaves_code_with_threads_alone(
    hosts: ZygoteHosts, tmp_path: Path
) -> None:
    write(tmp_path / "mine.py", THREAD + says("one"))
    write(tmp_path / "other.py", says("one"))
    info = await tool(hosts)
    await hosts.describe("other:f", Role.TOOL, field="tools.1")
    write(tmp_path / "other.py", says("two"), 1)
    await hosts.describe("other:f", Role.TOOL, field="tools.1")
    assert await once(hosts, info) == "one"


@pytest.mark.parametrize("edited", ["mine", "words"])
async def test_a_lost_zygote_does_not_let_new_code_run_as_the_old(
    hosts: ZygoteHosts, tmp_path: Path, edited: str
) -> None:
    write(tmp_path / "words.py", "WORD = 'one'\n")
    write(tmp_path / "mine.py", "import words\ndef f() -> str:\n    return words.WORD + ' 1'\n")
    old = await tool(hosts)
    file = tmp_path / f"{edited}.py"
    write(file, file.read_text().replace("one", "two").replace("1", "2"), 1)
    await lose_zygote(hosts, old)
    with pytest.raises(InfrastructureFailure, match="has changed meanwhile"):
        await once(hosts, old)
    assert await once(hosts, await tool(hosts)) == {"mine": "one 2", "words": "two 1"}[edited]


async def test_a_lost_zygote_is_replaced_by_one_that_holds_the_code(
    hosts: ZygoteHosts, tmp_path: Path
) -> None:
    count = tmp_path / "imports.txt"
    write(tmp_path / "mine.py", f"with open({str(count)!r}, 'a') as file: file.write('x')\n" + says("one"))
    old = await tool(hosts)
    await lose_zygote(hosts, old)
    assert await once(hosts, old) == "one"
    info = await tool(hosts)
    before = count.read_text()
    assert [await once(hosts, info) for _ in range(3)] == ["one"] * 3
    assert count.read_text() == before


async def test_code_that_ends_a_zygote_is_not_given_to_the_next(hosts: ZygoteHosts, tmp_path: Path) -> None:
    in_zygote = "import os, threading\nif threading.active_count() == 1: os._exit(1)\n"
    write(tmp_path / "mine.py", in_zygote + says("one"))
    info = await tool(hosts)
    async with hosts.open(Use.LEAF, handlers={}, log=lambda line: None, code=(info,)) as host:
        assert await once(hosts, await tool(hosts)) == "one"
        assert host.alive


async def test_a_file_edited_while_it_is_imported_is_described_as_it_runs(
    hosts: ZygoteHosts, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    text = "def f() -> str:\n    'The new one.'\n    return 'new'\n"
    write(file, f"open(__file__, 'w').write({text!r})\ndef f(x: int) -> str:\n    return 'old'\n")
    info = await tool(hosts)
    assert info.description == "The new one."
    assert info.version == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    assert await once(hosts, info) == "new"


async def test_what_the_zygote_read_otherwise_is_not_held(hosts: ZygoteHosts, tmp_path: Path) -> None:
    """A file that is swapped for the moment of the second reading, and back: no stamp tells."""
    mine, other, done = tmp_path / "mine.py", tmp_path / "other.txt", tmp_path / "done.txt"
    swap = (
        "import os\n"
        f"def swap():\n    os.rename({str(mine)!r}, {str(mine) + 'x'!r})\n"
        f"    os.rename({str(other)!r}, {str(mine)!r})\n"
        f"    os.rename({str(mine) + 'x'!r}, {str(other)!r})\n"
    )
    once_only = f"if not os.path.exists({str(done)!r}):\n    open({str(done)!r}, 'w').close()\n    swap()\n"
    version = write(mine, swap + once_only + says("one"))
    write(other, swap + "swap()\n" + says("two"))
    info = await tool(hosts)
    assert (info.version, await once(hosts, info)) == (version, "one")
