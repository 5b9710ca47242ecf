"""The agent ``command``: what it writes, how it runs, how it judges the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollserve.agent.base import AgentResult, Episode
from rollserve.agent.command import CommandAgent, CommandOptions, Program, filled, program_of
from rollserve.agent.registry import built_in
from rollserve.errors import (
    AgentFailure,
    InfrastructureFailure,
    InvalidInput,
    LimitReached,
    ProgramMissing,
    SandboxError,
)
from rollserve.records.call import Message
from rollserve.sandbox.base import ExecResult, Sandbox, SandboxSpec
from rollserve.sandbox.process import ProcessRuntime
from rollserve.testing.fakes import FakeSandbox, ScriptedModel, some_task

URL = "http://127.0.0.1:7/s/ses_1/v1"


@dataclass
class Seen:
    """A session as an agent sees it."""

    call_ids: list[str] = field(default_factory=lambda: ["c1"])
    trouble: LimitReached | InfrastructureFailure | None = None
    words: str = "42"

    def conversation(self) -> list[Message]:
        return [
            Message(role="user", content="do it"),
            Message(role="assistant", content=self.words),
            Message(role="tool", content="fine", tool_call_id="x"),
        ]


class NoTools:
    schemas = ()

    async def call(self, name: str, arguments: str) -> Any:
        raise AssertionError("a command has no tools")


@dataclass
class Stage:
    """An episode around a sandbox."""

    sandbox: Sandbox | None
    session: Seen = field(default_factory=Seen)
    log: list[str] = field(default_factory=list)
    instruction: str = 'it\'s "it"\n{api_key}'

    async def reach(self) -> str:
        return URL

    async def play(self, **options: Any) -> AgentResult:
        return await self.run(program_of(CommandOptions.model_validate(options)))

    async def run(self, program: Program) -> AgentResult:
        return await CommandAgent(program).run(
            Episode(
                task=some_task(instruction=self.instruction),
                tools=NoTools(),
                model=ScriptedModel(),
                log=self.log.append,
                api_key="s3cret",
                sandbox=self.sandbox,
                reach=self.reach,
                session=self.session,
            )
        )


@pytest.fixture
async def stage(tmp_path: Path) -> Any:
    """In plain processes: what is tested is the shell text."""
    runtime = ProcessRuntime(data_dir=tmp_path)
    yield Stage(await runtime.create(SandboxSpec(), owner="test", ttl_s=60))
    await runtime.close()


@pytest.fixture
def fake() -> Callable[..., Stage]:
    def make(code: int = 0, output: str = "") -> Stage:
        def shell(command: str) -> ExecResult:
            if "HOME" in command:
                return ExecResult(output="/home/box\n", exit_code=0)
            return ExecResult(output=output, exit_code=code)

        return Stage(FakeSandbox(shell))

    return make


# -- what is run
async def test_templates_are_filled_each_in_its_own_quoting(stage: Stage) -> None:
    result = await stage.play(
        command="cat ~/note.json; echo; printf '%s|' {instruction} {model} {context_tokens} $ADDRESS {other}",
        env={"ADDRESS": "{plain_url} {session_url} {base_url}"},
        files={"~/note.json": '{"key": "{api_key}", "text": "{instruction}", "plain": {max_tokens}}'},
        model="name",
        context_tokens=5,
        max_tokens=6,
    )
    note, said = result.detail["output_end"].split("\n", 1)
    assert json.loads(note.replace("[secret]", "s3cret")) == {
        "key": "s3cret",
        "text": stage.instruction,
        "plain": 6,
    }
    addresses = "http://127.0.0.1:7|http://127.0.0.1:7/s/ses_1|http://127.0.0.1:7/s/ses_1/v1"
    assert said == f"{stage.instruction}|name|5|{addresses}|{{other}}|"


async def test_what_is_filled_in_is_not_filled_again() -> None:
    assert filled("{instruction}", {"instruction": "{api_key}", "api_key": "x"}) == "{api_key}"


async def test_the_instruction_is_in_a_file_of_any_size(stage: Stage) -> None:
    stage.instruction = "x" * 500_000
    result = await stage.play(command="wc -c < {instruction_file}")
    assert result.detail["output_end"].strip() == "500000"
    with pytest.raises(AgentFailure, match="instruction_file"):
        await stage.play(command="echo {instruction}")


async def test_it_runs_in_its_folder_with_stdin_closed(stage: Stage) -> None:
    result = await stage.play(command="cat; pwd", workdir="/usr")
    assert result.detail["output_end"] == "/usr\n"
    with pytest.raises(AgentFailure, match="exit code 126"):
        await stage.play(command="true", workdir="/nowhere/at/all")


async def test_folders_of_the_program_come_first_on_its_path_only(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "mytool"
    tool.write_text("#!/bin/sh\necho mine\n")
    tool.chmod(0o755)
    result = await stage.run(Program(command="mytool", needs=("mytool",), path=(str(tmp_path / "bin"),)))
    assert result.detail["output_end"] == "mine\n"
    assert stage.sandbox is not None
    assert (await stage.sandbox.exec("command -v mytool")).exit_code != 0


async def test_a_missing_program_is_no_fault_of_the_agent(stage: Stage) -> None:
    with pytest.raises(ProgramMissing, match="not found in the sandbox: no-such-program"):
        await stage.play(command="no-such-program", needs=["sh", "no-such-program"])


async def test_without_a_sandbox_it_can_not_run() -> None:
    with pytest.raises(SandboxError):
        await Stage(None).play(command="true")


# -- what it leaves
async def test_output_is_logged_to_a_bound_and_without_the_secret(stage: Stage) -> None:
    result = await stage.play(command="echo key={api_key}; seq 1 1000; printf end", log_bytes=40)
    assert stage.log[:3] == ["key=[secret]", "1", "2"]
    assert stage.log[-2] == f"[of {result.detail['output_bytes']} bytes of output the rest is not kept]"
    assert stage.log[-1] == "the command ended: exit code 0"
    assert result.detail["output_end"].endswith("1000\nend")
    assert "s3cret" not in "".join(stage.log)


async def test_the_answer_is_the_models_last_text(stage: Stage) -> None:
    result = await stage.play(command="echo done")
    assert result.answer == "42"
    assert result.detail["exit_code"] == 0
    assert result.detail["ended"] == "exit code 0"


@pytest.mark.parametrize("path", ["answer", "~/answer"])
async def test_the_answer_may_be_in_a_file(stage: Stage, path: str) -> None:
    result = await stage.play(command=f"echo ' 7 ' > {path}", answer_file=path)
    assert result.answer == "7"
    missing = await stage.play(command="true", answer_file="nothing")
    assert missing.answer is None
    assert any("no answer" in line for line in stage.log)


async def test_the_end_of_a_report_is_logged(stage: Stage) -> None:
    await stage.run(Program(command="echo told > ~/report", report="~/report"))
    assert "~/report: told\n" in stage.log


# -- how it ends
async def test_an_exit_code_is_a_failure_that_says_its_meaning(fake: Callable[..., Stage]) -> None:
    program = Program(command="x", ends={41: "no way to sign in"})
    with pytest.raises(AgentFailure, match=r"exit code 41 \(no way to sign in\): it says no"):
        await fake(41, "it says no\n").run(program)


async def test_a_signal_is_named(fake: Callable[..., Stage]) -> None:
    with pytest.raises(AgentFailure, match="killed by SIGKILL"):
        await fake(137).play(command="x")


async def test_a_good_end_after_a_failed_call_is_none(fake: Callable[..., Stage]) -> None:
    stage = fake()
    stage.session.trouble = LimitReached("max_turns", "64 turns")
    with pytest.raises(AgentFailure, match="last call failed"):
        await stage.play(command="x")


async def test_a_good_end_without_a_call_is_none(fake: Callable[..., Stage]) -> None:
    stage = fake(output="bye")
    stage.session.call_ids = []
    with pytest.raises(AgentFailure, match="without one model call: bye"):
        await stage.play(command="x")


# -- options
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "command"),
        ({"command": ""}, "command"),
        ({"command": "a\0b"}, "command"),
        ({"command": "x", "env": {"1A": "b"}}, "env.1A"),
        ({"command": "x", "model": 'a"b'}, "model"),
        ({"command": "x", "context_tokens": 0}, "context_tokens"),
        ({"command": "x", "comand": "y"}, "comand"),
    ],
)
def test_bad_options_are_named_before_anything_starts(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        built_in()["command"].check(options)
    assert caught.value.field is not None
    assert caught.value.field.startswith(f"agent.options.{field}")


def test_it_acts_inside() -> None:
    entry = built_in()["command"]
    assert entry.acts_inside
    assert entry.mounts({"command": "x"}) == {}
