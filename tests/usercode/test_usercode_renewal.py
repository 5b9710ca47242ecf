"""Files of the user's that change while hosts are there: new uses run what is there now, old ones go on."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollserve.errors import InfrastructureFailure, InvalidInput
from rollserve.grader.registry import GraderCatalog
from rollserve.records.task import GraderSpec
from rollserve.sandbox.tools import ToolResult
from rollserve.usercode import params
from rollserve.usercode.base import CodeHost, CodeInfo, Role, Use
from rollserve.usercode.curriculum import HostedCurriculum
from rollserve.usercode.filters import HostedFilters
from rollserve.usercode.hosts import KEPT, ZygoteHosts


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._edits = 0

    def write(self, text: str, name: str = "mine") -> str:
        """The version that is to be recorded. No two texts are of one length: Python's own cache knows a
        file by its second and size."""
        self._edits += 1
        source = f"{text}\n#{'x' * self._edits}\n"
        (self.path / f"{name}.py").write_text(source)
        return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"

    def says(self, word: str) -> str:
        return self.write(f"def f() -> str:\n    return {word!r}")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
async def hosts(folder: Folder) -> AsyncIterator[ZygoteHosts]:
    hosts = ZygoteHosts(code_dir=folder.path, max_hosts=8)
    yield hosts
    await hosts.close()


async def tool(hosts: ZygoteHosts, path: str = "mine:f") -> CodeInfo:
    return await hosts.describe(path, Role.TOOL, field="tools.0")


async def ask(host: CodeHost) -> str:
    order = params.RunTool(path="mine:f", arguments_json=b"{}", sandbox_id=None)
    return (await host.call("tool", order, ToolResult, timeout_s=30.0)).text


async def once(hosts: ZygoteHosts, info: CodeInfo) -> str:
    async with hosts.open(Use.LEAF, handlers={}, log=lambda line: None, code=(info,)) as host:
        return await ask(host)


async def test_changed_code_is_taken_up_and_its_version_told(hosts: ZygoteHosts, folder: Folder) -> None:
    first = folder.says("one")
    old = await tool(hosts)
    assert (old.version, await once(hosts, old)) == (first, "one")
    second = folder.says("two")
    new = await tool(hosts)
    assert (new.version, await once(hosts, new)) == (second, "two")


async def test_what_began_with_the_old_code_goes_on_with_it(hosts: ZygoteHosts, folder: Folder) -> None:
    folder.says("one")
    old = await tool(hosts)
    async with hosts.open(Use.LEAF, handlers={}, log=lambda line: None, code=(old,)) as host:
        folder.says("two")
        new = await tool(hosts)
        assert await ask(host) == "one"
    assert await once(hosts, old) == "one"
    assert await once(hosts, new) == "two"


async def test_a_new_function_of_a_known_file_is_found(hosts: ZygoteHosts, folder: Folder) -> None:
    folder.says("one")
    await tool(hosts)
    with pytest.raises(InvalidInput, match="has no 'g'"):
        await tool(hosts, "mine:g")
    folder.write("def f() -> str: return 'f'\ndef g() -> str: return 'g'")
    assert (await tool(hosts, "mine:g")).name == "g"


async def test_a_file_that_another_imports_counts(hosts: ZygoteHosts, folder: Folder) -> None:
    folder.write("WORD = 'one'", "words")
    folder.write("import words\ndef f() -> str:\n    return words.WORD")
    assert await once(hosts, await tool(hosts)) == "one"
    folder.write("WORD = 'two'", "words")
    assert await once(hosts, await tool(hosts)) == "two"


async def test_a_file_that_is_gone_or_broken_is_refused(hosts: ZygoteHosts, folder: Folder) -> None:
    folder.says("one")
    await tool(hosts)
    folder.write("def f(:")
    with pytest.raises(InvalidInput, match="can't be loaded"):
        await tool(hosts)
    folder.says("two")
    assert await once(hosts, await tool(hosts)) == "two"
    (folder.path / "mine.py").unlink()
    with pytest.raises(InvalidInput, match="no module named 'mine'"):
        await tool(hosts)


async def test_nothing_changes_while_files_do_not(hosts: ZygoteHosts, folder: Folder) -> None:
    folder.says("one")
    info = await tool(hosts)
    folder.write("def other() -> str: return 'o'", "another")
    (folder.path / "data.json").write_text("{}")
    assert await tool(hosts) is info


async def test_a_few_old_states_are_held_and_no_more(hosts: ZygoteHosts, folder: Folder) -> None:
    seen = []
    for edit in range(KEPT + 2):
        folder.says(str(edit))
        seen.append(await tool(hosts))
    with pytest.raises(InfrastructureFailure, match="has changed meanwhile"):
        await once(hosts, seen[0])
    assert [await once(hosts, info) for info in seen[1:]] == [str(edit) for edit in range(1, KEPT + 2)]


async def test_what_no_zygote_holds_is_not_run_as_something_else(hosts: ZygoteHosts, folder: Folder) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    folder.write(f"{thread}def f() -> str: return 'one'")
    old = await tool(hosts)
    folder.write(f"{thread}def f() -> str: return 'two'")
    new = await tool(hosts)
    with pytest.raises(InfrastructureFailure, match="has changed meanwhile"):
        await once(hosts, old)
    assert await once(hosts, new) == "two"


async def test_filters_and_curricula_are_taken_up_too(hosts: ZygoteHosts, folder: Folder) -> None:
    filters, curricula = HostedFilters(hosts), HostedCurriculum(hosts)

    async def both() -> tuple[Any, Any]:
        return await filters.keeps("mine:keep", {}), await curricula.next_tasks("mine:pick", {})

    folder.write("def keep(): return True\ndef pick(): return [1]")
    assert await both() == (True, [1])
    folder.write("def keep(): return False\ndef pick(): return [2]")
    assert await both() == (False, [2])


async def test_the_entry_of_a_grader_names_the_version_it_runs(hosts: ZygoteHosts, folder: Folder) -> None:
    graders = GraderCatalog(hosts)
    spec = GraderSpec(name="mine:grade", options={})
    first = folder.write("def grade(grading): return 0.0")
    old = await graders.resolve(spec)
    second = folder.write("def grade(grading): return 1.0")
    assert (old.code, (await graders.resolve(spec)).code) == (
        {"mine:grade": first},
        {"mine:grade": second},
    )
