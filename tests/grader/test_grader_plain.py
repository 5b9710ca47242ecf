"""Graders that need no process of their own: exact, numeric, command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollserve import installing
from rollserve.errors import GraderFailure, InvalidInput, SandboxError, UnknownName
from rollserve.grader.base import Grade, Grader
from rollserve.grader.math import check_installed
from rollserve.grader.numeric import last_number
from rollserve.grader.registry import GraderCatalog
from rollserve.records.task import GraderSpec
from rollserve.sandbox.base import ExecResult
from rollserve.testing.fakes import FakeSandbox, some_grading
from rollserve.usercode.hosts import ZygoteHosts


def catalog() -> GraderCatalog:
    return GraderCatalog(ZygoteHosts(), installed={"theirs": "my_graders:plain"})


async def made(name: str, **options: Any) -> Grader:
    spec = GraderSpec(name=name, options=options)
    await catalog().check(spec)
    return (await catalog().resolve(spec)).make(dict(spec.options))


async def reward(name: str, given: str | None, **options: Any) -> float:
    grader = await made(name, **options)
    assert grader.carry is None
    return (await grader.grade(some_grading(given))).reward


@pytest.mark.parametrize(
    ("answer", "options", "expected"),
    [
        ("42", {"answer": "42"}, 1.0),
        (" 42\n", {"answer": "42"}, 1.0),
        (" 42", {"answer": "42", "strip": False}, 0.0),
        ("Yes", {"answer": "yes"}, 0.0),
        ("STRASSE", {"answer": "straße", "ignore_case": True}, 1.0),
        ("b", {"answer": ["a", "b"]}, 1.0),
        ("43", {"answer": "42"}, 0.0),
        ("", {"answer": "42"}, 0.0),
        (None, {"answer": "42"}, 0.0),
        (None, {"answer": ""}, 0.0),
    ],
)
async def test_exact(answer: str | None, options: dict[str, Any], expected: float) -> None:
    assert await reward("exact", answer, **options) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 1,234.5.", 1234.5),
        ("first 3, then 4", 4.0),
        ("x=-3e-2", -0.03),
        ("10-5", 5.0),
        ("(-5)", -5.0),
        ("−7", -7.0),
        (".5", 0.5),
        ("42.", 42.0),
        ("12,345,678", 12345678.0),
        ("1,2345", 2345.0),
        ("7 and 1e999", 7.0),
        ("none ... at . all", None),
        ("", None),
    ],
)
def test_the_last_number_is_found(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    "text", ["1" * 300_000, "1," * 300_000, "." * 300_000, "-" * 300_000, "1e" * 300_000]
)
def test_long_answers_are_read_in_linear_time(text: str) -> None:
    last_number(text)


async def test_numeric() -> None:
    assert await reward("numeric", "about 3.14159", answer=3.14, abs_tol=0.01) == 1.0
    assert await reward("numeric", "1010", answer=1000, rel_tol=0.01) == 1.0
    assert await reward("numeric", "1011", answer=1000, rel_tol=0.01) == 0.0
    assert await reward("numeric", "no idea", answer=0) == 0.0
    assert await reward("numeric", None, answer=0) == 0.0


Shell = Callable[[str], ExecResult]


def shell(exit_code: int | None = 0, output: str = "", **written: bytes) -> tuple[FakeSandbox, Shell]:
    """A sandbox whose grading command writes files (by name, in the working directory)."""
    sandbox = FakeSandbox()

    def run(command: str) -> ExecResult:
        if command.startswith("rm -rf -- "):
            sandbox.files.pop(f"/workspace/{command.removeprefix('rm -rf -- ')}", None)
            return ExecResult(output="", exit_code=0)
        for name, data in written.items():
            sandbox.files[f"/workspace/{name}"] = data
        return ExecResult(output=output, exit_code=exit_code, timed_out=exit_code is None)

    sandbox._shell = run
    return sandbox, run


async def graded(sandbox: FakeSandbox, log: list[str] | None = None, **options: Any) -> Grade:
    grader = await made("command", command="./test", **options)
    assert grader.carry == ("/workspace",)
    return await grader.grade(some_grading(sandbox=sandbox, log=log))


async def test_the_exit_code_is_the_reward() -> None:
    log: list[str] = []
    sandbox, _ = shell(0, "all passed")
    assert (await graded(sandbox, log, timeout_s=7)).reward == 1.0
    assert sandbox.commands == [("./test", 7.0)]
    assert log == ["all passed"]
    for code in (1, 2, 137, 139):
        assert await graded(shell(code)[0]) == Grade(reward=0.0, detail={"exit_code": code})


@pytest.mark.parametrize(
    ("code", "says"), [(None, "longer than"), (126, "can't be executed"), (127, "was not found")]
)
async def test_a_command_that_did_not_run_to_its_end_is_a_failure(code: int | None, says: str) -> None:
    with pytest.raises(GraderFailure, match=says):
        await graded(shell(code, r=b"1")[0])
    with pytest.raises(GraderFailure, match=says):
        await graded(shell(code, r=b"1")[0], reward_file="r")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"0.25\n", Grade(reward=0.25)),
        (b"-1", Grade(reward=-1.0)),
        (b'{"reward": 1}', Grade(reward=1.0)),
        (
            b'{"reward": 0.5, "call_rewards": {"c1": 1.5}, "detail": {"passed": 3}, "other": 1}',
            Grade(reward=0.5, call_rewards={"c1": 1.5}, detail={"passed": 3}),
        ),
    ],
)
async def test_a_reward_file_is_read(data: bytes, expected: Grade) -> None:
    assert await graded(shell(1, r=data)[0], reward_file="r") == expected


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "can't be read"),
        (b"good", "can't be read"),
        (b"nan", "no reward"),
        (b"inf", "no reward"),
        (b"{broken", "can't be read"),
        (b'{"score": 1}', "can't be read"),
        (b'{"reward": "1"}', "can't be read"),
        (b'{"reward": 1e999}', "can't be read|no reward"),
        (b'{"reward": 1, "call_rewards": {"c9": 1}}', "no such call: 'c9'"),
        (b'{"reward":' * 10_000, "can't be read"),
        (b"\xff\xfe", "can't be read"),
        (b"1" * (2 << 20), "too large"),
        (None, "no reward in r: no such file"),
    ],
)
async def test_an_unreadable_reward_is_a_failure(data: bytes | None, says: str) -> None:
    sandbox, _ = shell() if data is None else shell(r=data)
    with pytest.raises(GraderFailure, match=says):
        await graded(sandbox, reward_file="r")


async def test_a_reward_that_the_agent_left_does_not_count() -> None:
    sandbox, _ = shell(0)
    sandbox.files["/workspace/r"] = b"1.0"
    with pytest.raises(GraderFailure, match="no reward in r"):
        await graded(sandbox, reward_file="r")


async def test_a_lost_sandbox_is_infrastructure() -> None:
    sandbox, run = shell(0)

    def lose(command: str) -> ExecResult:
        result = run(command)
        sandbox.gone = command == "./test"
        return result

    sandbox._shell = lose
    with pytest.raises(SandboxError):
        await graded(sandbox, reward_file="r")
    with pytest.raises(GraderFailure, match="no sandbox"):
        await (await made("command", command="x")).grade(some_grading())


@pytest.mark.parametrize(
    ("name", "options", "field", "says"),
    [
        ("exct", {}, "grader.name", "did you mean 'exact'?"),
        ("their", {}, "grader.name", "did you mean 'theirs'?"),
        ("exact", {}, "grader.options.answer", "required"),
        ("exact", {"answer": []}, "grader.options.answer", ""),
        ("exact", {"answer": "1", "ignorecase": True}, "grader.options.ignorecase", "'ignore_case'"),
        ("numeric", {"answer": "many"}, "grader.options.answer", "number"),
        ("numeric", {"answer": 1, "abs_tol": -1}, "grader.options.abs_tol", "greater"),
        ("command", {"command": ""}, "grader.options.command", "at least 1"),
        ("command", {"command": "x", "timeout_s": 0}, "grader.options.timeout_s", "greater"),
        ("command", {"command": "x", "carry": "/workspace"}, "grader.options.carry", "list"),
        ("math", {"answer": "1", "timeout": 3}, "grader.options.timeout", "'timeout_s'"),
    ],
)
async def test_bad_options_are_named(name: str, options: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await catalog().check(GraderSpec(name=name, options=options))
    assert (caught.value.field or "").startswith(field)
    assert says in str(caught.value)
    assert isinstance(caught.value, UnknownName) == (field == "grader.name")


def test_a_missing_extra_says_how_to_get_it() -> None:
    with pytest.raises(InvalidInput) as caught:
        check_installed("math_verify_that_is_not_installed")
    assert installing.extra("math") in str(caught.value.hint)
