"""Graders that run in code hosts: functions of the user's, and math."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollserve.errors import GraderFailure, InvalidInput, SandboxError
from rollserve.grader.base import Grade, Grader
from rollserve.grader.registry import GraderCatalog
from rollserve.records.image import digest_of
from rollserve.records.task import GraderSpec
from rollserve.sandbox.base import ExecResult
from rollserve.testing.fakes import FakeSandbox, ScriptedModel, says, some_grading
from rollserve.usercode.hosts import ZygoteHosts

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def made(hosts: ZygoteHosts, name: str, **options: Any) -> Grader:
    entry = await GraderCatalog(hosts).resolve(GraderSpec(name=f"my_graders:{name}"))
    assert entry.code[f"my_graders:{name}"].startswith("sha256:")
    return entry.make(options)


async def test_what_a_function_returns_is_the_grade(grader_hosts: ZygoteHosts) -> None:
    log: list[str] = []
    grader = await made(grader_hosts, "plain", wanted="42", scale=0.5)
    assert grader.carry is None
    assert await grader.grade(some_grading("42", log=log)) == Grade(reward=0.5)
    assert await grader.grade(some_grading(None)) == Grade(reward=0.0)
    assert log == ["grading 42"]
    words = await (await made(grader_hosts, "words")).grade(some_grading("42"))
    assert words == Grade(reward=0.5, call_rewards={"c1": 1.0}, detail={"said": ["do it", "42"]})
    mapping = await (await made(grader_hosts, "mapping")).grade(some_grading())
    assert mapping == Grade(reward=1.0, detail={"image": "host"})
    assert (await (await made(grader_hosts, "truth")).grade(some_grading("42"))).reward == 1.0


async def test_a_function_asks_a_model(grader_hosts: ZygoteHosts) -> None:
    for name in ("judged", "judged_async"):
        model = ScriptedModel(says("0.25"), GraderFailure("no judge", operation="grade.model"))
        grader = await made(grader_hosts, name)
        assert (await grader.grade(some_grading("42", model=model))).reward == 0.25
        assert model.models == ["judge"]
        assert [message.content for message in model.asked[0]] == ["is 42 right?"]
        with pytest.raises(GraderFailure, match="no judge"):
            await grader.grade(some_grading("42", model=model))


async def test_a_function_shows_a_model_an_image(grader_hosts: ZygoteHosts) -> None:
    model = ScriptedModel(says("0.5"), sees=True)
    grader = await made(grader_hosts, "looks")
    assert (await grader.grade(some_grading("42", model=model))).reward == 0.5
    assert (model.shown, model.models) == ([b"PNG"], ["judge", "judge"])
    assert [image.digest for image in model.asked[0][0].images] == [digest_of(b"PNG")]


async def test_a_function_acts_in_the_grading_sandbox(grader_hosts: ZygoteHosts) -> None:
    sandbox = FakeSandbox(
        lambda command: ExecResult(output="0.75", exit_code=0), files={"/workspace/a": b"0.25"}
    )
    grader = await made(grader_hosts, "in_sandbox", carry=["/workspace"])
    assert grader.carry == ("/workspace",)
    assert (await grader.grade(some_grading(sandbox=sandbox))).reward == 0.25
    assert sandbox.files["/workspace/b"] == b"new"
    coroutine = await made(grader_hosts, "in_sandbox_async", carry=[])
    assert coroutine.carry == ()
    assert (await coroutine.grade(some_grading(sandbox=sandbox))).reward == 0.75
    del sandbox.files["/workspace/a"]
    with pytest.raises(GraderFailure, match="no such file"):
        await grader.grade(some_grading(sandbox=sandbox))
    await sandbox.close()
    with pytest.raises(SandboxError):
        await grader.grade(some_grading(sandbox=sandbox))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("crash", "RuntimeError: no grade"),
        ("leave", "sys.exit(0)"),
        ("hang", "still running after 0.3 s"),
        ("words_for_a_number", "returned str"),
        ("nothing", "returned NoneType"),
        ("bad_mapping", "returned a bad grade"),
        ("not_a_number", "reward is nan"),
        ("endless", "c1 is inf"),
        ("beyond_float32", "reward is 1e+300"),
        ("stranger", "no such call: 'c9'"),
    ],
)
async def test_what_is_no_grade_is_a_failure(grader_hosts: ZygoteHosts, name: str, says: str) -> None:
    grader = await made(grader_hosts, name, timeout_s=0.3 if name == "hang" else 30)
    with pytest.raises(GraderFailure) as caught:
        await grader.grade(some_grading())
    assert says in str(caught.value)
    assert grader_hosts.live == 0


async def test_a_cancelled_grading_leaves_no_process(grader_hosts: ZygoteHosts) -> None:
    grader = await made(grader_hosts, "hang")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await grader.grade(some_grading())
    assert grader_hosts.live == 0


@pytest.mark.parametrize(
    ("name", "options", "field", "says"),
    [
        ("my_graders:plian", {}, "grader.name", "did you mean 'plain'?"),
        ("my_graders:plain", {"wantd": "1"}, "grader.options.wantd", "did you mean 'wanted'?"),
        ("my_graders:plain", {"scale": "big"}, "grader.options.scale", "must be number, not string"),
        ("my_graders:plain", {"carry": "/x"}, "grader.options.carry", "list"),
        ("my_graders:plain", {"timeout_s": -1}, "grader.options.timeout_s", "greater"),
    ],
)
async def test_bad_options_are_named_before_anything_starts(
    grader_hosts: ZygoteHosts, name: str, options: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await GraderCatalog(grader_hosts).check(GraderSpec(name=name, options=options))
    assert caught.value.field == field
    assert says in str(caught.value)


async def test_math(grader_hosts: ZygoteHosts) -> None:
    pytest.importorskip("math_verify")
    entry = await GraderCatalog(grader_hosts).resolve(GraderSpec(name="math"))

    async def reward(expected: str, answer: str | None) -> float:
        log: list[str] = []
        grade = await entry.make({"answer": expected}).grade(some_grading(answer, log=log))
        assert log == []
        return grade.reward

    assert await reward("1/2", "I get 0.5") == 1.0
    assert await reward("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}") == 1.0
    assert await reward("x^2+1", "1+x^2") == 1.0
    assert await reward("1", "x^2+1") == 0.0
    assert await reward("1/2", "0.51") == 0.0
    assert await reward("1/2", "who knows") == 0.0
    assert await reward("1/2", None) == 0.0
    with pytest.raises(GraderFailure, match="can't be read"):
        await reward("\\", "1")


async def test_math_that_does_not_end_is_a_failure(grader_hosts: ZygoteHosts) -> None:
    pytest.importorskip("math_verify")
    entry = await GraderCatalog(grader_hosts).resolve(GraderSpec(name="math"))
    grader = entry.make({"answer": "7", "timeout_s": 1.0})
    with pytest.raises(GraderFailure, match="still running after 1 s"):
        await grader.grade(some_grading("$7^{7^{7^{7^{7^{7}}}}} + \\sqrt{2}$"))
    assert grader_hosts.live == 0
