"""Import paths: what is said of good ones, and of bad ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rollserve.errors import ConfigError, InvalidInput
from rollserve.sandbox.tools import ToolResult
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeInfo, Ending, Role, Use
from rollserve.usercode.hosts import HostSettings, ZygoteHosts


async def test_a_tool_is_described_by_its_signature_and_docstring(hosts: ZygoteHosts, code_dir: Path) -> None:
    info = await hosts.describe("good:add", Role.TOOL, field="tools.0")
    assert info.name == "add"
    assert info.description == "Add two numbers."
    assert info.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first"},
            "b": {"type": "integer", "default": 2, "description": "the second, which may be left out"},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    digest = hashlib.sha256((code_dir / "good.py").read_bytes()).hexdigest()
    assert info.version == f"sha256:{digest}"
    assert not info.wants_sandbox
    sandboxed = await hosts.describe("good:reads", Role.TOOL, field="tools.0")
    assert sandboxed.wants_sandbox
    assert list(sandboxed.parameters["properties"]) == ["path"]


async def test_the_version_of_a_distribution_is_named(hosts: ZygoteHosts) -> None:
    info = await hosts.describe("msgspec.json:encode", Role.ANY, field="x")
    assert " msgspec==" in info.version


@pytest.mark.parametrize(
    ("path", "role", "says"),
    [
        ("goood:add", Role.TOOL, "no module named 'goood'"),
        ("good.sub:add", Role.TOOL, "good.sub"),
        ("good:ad", Role.TOOL, "did you mean 'add'?"),
        ("good:Thing.valu", Role.ANY, "did you mean 'value'?"),
        ("good:NUMBER", Role.TOOL, "is a int"),
        ("good", Role.TOOL, "no import path"),
        ("good:", Role.TOOL, "no import path"),
        ("go od:add", Role.TOOL, "no import path"),
        ("../good:add", Role.TOOL, "no import path"),
        ("good:Thing", Role.TOOL, "is a class"),
        ("good:Thing", Role.AGENT, "async def run"),
        ("good:add", Role.AGENT, "not a class"),
        ("good:Thing", Role.GRADER, "is a class"),
        ("good:pid", Role.GRADER, "must take (grading), not ()"),
        ("good:variadic", Role.TOOL, "can't be passed by name"),
        ("good:unknown_type", Role.TOOL, "Nowhere"),
        ("good:no_schema", Role.TOOL, "no JSON schema"),
        ("broken_syntax:f", Role.TOOL, "SyntaxError"),
        ("broken_import:f", Role.TOOL, "nothing_of_the_kind"),
        ("broken_body:f", Role.TOOL, "ValueError: at import"),
        ("leaves:f", Role.TOOL, "sys.exit(4)"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_path_that_can_not_be_used_says_why(
    shared_hosts: ZygoteHosts, path: str, role: Role, says: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await shared_hosts.describe(path, role, field="tools.3")
    assert caught.value.field == "tools.3"
    assert says in str(caught.value)


@pytest.mark.parametrize("module", ["broken_syntax", "broken_import", "broken_body"])
@pytest.mark.asyncio(loop_scope="module")
async def test_why_it_can_not_be_loaded_names_the_users_lines_alone(
    shared_hosts: ZygoteHosts, module: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await shared_hosts.describe(f"{module}:f", Role.TOOL, field="tools.0")
    files = [line for line in str(caught.value).splitlines() if line.lstrip().startswith("File ")]
    assert len(files) == 1
    assert f'{module}.py", line 1' in files[0]


async def test_a_module_that_hangs_is_given_up(code_dir: Path) -> None:
    hosts = ZygoteHosts(code_dir=code_dir, settings=HostSettings(describe_s=0.3))
    try:
        with pytest.raises(InvalidInput, match="still running after"):
            await hosts.describe("hangs:f", Role.TOOL, field="tools.0")
    finally:
        await hosts.close()


async def test_an_import_that_hangs_later_on_is_told_by_the_next_call(code_dir: Path) -> None:
    hosts = ZygoteHosts(code_dir=code_dir, settings=HostSettings(describe_s=0.3, cancel_grace_s=0.3))
    described = CodeInfo(path="hangs:f", role=Role.TOOL, name="f", module="hangs", generation=1)
    order = params.RunTool(path="hangs:f", arguments_json=b"{}", sandbox_id=None)
    try:
        async with hosts.open(Use.LEAF, handlers={}, log=lambda line: None, code=(described,)) as host:
            for _ in range(2):
                with pytest.raises(CodeFault, match=r"^at import: still running after 0\.3 s$") as caught:
                    await host.call("tool", order, ToolResult, timeout_s=30.0)
                assert caught.value.ending is Ending.TIMED_OUT
    finally:
        await hosts.close()


async def test_a_corrected_module_is_looked_at_again(hosts: ZygoteHosts, code_dir: Path) -> None:
    with pytest.raises(InvalidInput):
        await hosts.describe("broken_body:f", Role.TOOL, field="tools.0")
    (code_dir / "broken_body.py").write_text("def f() -> None: ...\n")
    assert (await hosts.describe("broken_body:f", Role.TOOL, field="tools.0")).name == "f"


async def test_a_module_with_threads_is_not_held_by_the_zygote(hosts: ZygoteHosts) -> None:
    info = await hosts.describe("threaded:f", Role.TOOL, field="tools.0")
    assert not info.forkable
    assert (await hosts.describe("good:add", Role.TOOL, field="tools.0")).forkable


async def test_start_checks_what_is_to_be_preloaded(code_dir: Path) -> None:
    hosts = ZygoteHosts(code_dir=code_dir, preload=["good:add", "good:nothing"])
    try:
        with pytest.raises(ConfigError, match="has no 'nothing'") as caught:
            await hosts.start()
        assert caught.value.field == "preload.1"
    finally:
        await hosts.close()
