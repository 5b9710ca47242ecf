"""What ``rollserve evaluate`` and ``rollserve callback`` say."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.cli import evaluate
from rollserve.errors import InvalidInput
from rollserve.records.evaluation import Comparison, Estimate, Evaluation, Side, Spread, TaskName
from rollserve.testing.callback_receiver import a_receiver
from rollserve.wire import OpenRun
from tests.integration.conftest import Server, add_policy, finished, shell_task

from .test_cli_commands import as_json, rollserve

FOUND = Evaluation(
    run_id="run_1",
    purpose="evaluation",
    policy="pol",
    threshold=1.0,
    confidence=0.95,
    tasks=3,
    rollouts=12,
    graded=10,
    ungraded={"agent": 2},
    mean_reward=Estimate(value=0.5, low=0.25, high=0.75, tasks=3),
    pass_at={1: Estimate(value=0.5, tasks=1, short=2)},
    sampled_tokens=None,
    prompt_tokens=None,
    turns=Spread(mean=2.0, median=2.0, p90=3.0, total=24.0),
    seconds=None,
)
COMPARED = Comparison(
    ours=Side(run_id="run_1", only_here=[TaskName(key="k", title="mine")], only_here_total=1, ungraded=2),
    theirs=Side(run_id="run_2", only_here=[], only_here_total=0, ungraded=0),
    threshold=1.0,
    confidence=0.95,
    tasks=3,
    wins=2,
    losses=1,
    ties=0,
    not_graded=[],
    not_graded_total=0,
    mean_reward=Estimate(value=0.125, low=-0.25, high=0.5, tasks=3),
    pass_at={},
)


def test_what_has_no_grade_is_said_before_any_figure(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate._show(FOUND)
    text = capsys.readouterr().out
    assert "3 tasks, 10 of 12 rollouts graded" in text
    assert text.index("2 agent") < text.index("mean reward")
    assert "0.25 … 0.75" in text
    assert "unknown" in text


def test_a_comparison_names_what_only_one_has(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate._show_comparison(COMPARED)
    text = capsys.readouterr().out
    assert "2 won, 1 lost, 0 tied" in text
    assert "only in run_1: 1 task: mine" in text
    assert "2 rollouts of run_1 without a grade" in text
    assert "-0.25 … 0.5" in text


@pytest.mark.parametrize("text", ["", "one", "1,,2", "1.5"])
def test_a_k_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        evaluate.How.of(text, 1.0, 0.95)
    assert caught.value.field == "k"


async def test_two_evaluations_and_a_callback_of_a_real_server(server: Server, backend_url: str) -> None:
    at = ("--url", server.url)
    async with server.client() as client, a_receiver() as receiver:
        await add_policy(client, backend_url)
        told = {
            "policy": "tiny",
            "purpose": "evaluation",
            "callback": {"url": receiver.url},
            "callback_secret": receiver.secret,
        }
        first = await client.open_run(OpenRun.model_validate(told))
        second = await client.open_run(OpenRun(policy="tiny", purpose="evaluation"))
        for run in (first, second):
            await run.submit([shell_task(), shell_task(instruction="And now?")], num_rollouts=2)
            await finished(run, 2)
        found = await as_json("evaluate", first.id, "-k", "1,2", *at)
        assert (found["tasks"], found["graded"], found["ungraded"]) == (2, 4, {})
        assert found["pass_at"]["2"]["value"] == found["mean_reward"]["value"] == 1.0
        assert found["turns"]["total"] > 4
        assert [each["passed"] for each in found["by_task"]] == [2, 2]
        compared = await as_json("evaluate", first.id, "--compare", second.id, *at)
        assert (compared["tasks"], compared["ties"]) == (2, 2)
        assert (await rollserve("evaluate", first.id, "--compare", first.id, *at))[0] == 1
        code, text, _ = await rollserve("evaluate", first.id, *at)
        assert (code, "And now?" in text) == (0, True)

        async with asyncio.timeout(60):
            while (await first.callback()).messages["sent"] < 2:
                await asyncio.sleep(0.05)
        shown = await as_json("callback", first.id, "--resend", *at)
        assert (shown["state"], shown["resent"], shown["open"]) == ("active", 0, [])
        assert shown["messages"]["sent"] == 2
        code, text, _ = await rollserve("status", first.id, *at)
        assert (code, f"callback {receiver.url}: active" in text, "2 sent" in text) == (0, True, True)
        assert (await rollserve("callback", second.id, *at))[0] == 1
