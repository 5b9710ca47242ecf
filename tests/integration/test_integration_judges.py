"""A grader of the user's that asks a judge, on real parts but for the engines: the reward is what the judge
said, and a judge that is dead is never one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from rollserve.client import Client, FinishedGroup, RunHandle
from rollserve.errors import FailureKind, InvalidInput
from rollserve.records.regrade import RegradingState
from rollserve.records.rollout import RolloutState
from rollserve.records.run import RetrySettings, RouteSpec
from rollserve.records.task import GraderSpec, Limits
from rollserve.testing.scripted import Fault, Reply, ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.tiny_tokenizer import TinyTokenizer
from rollserve.wire import OpenRun
from tests.integration.conftest import Server, add_policy, finished, shell_task

RETRY = RetrySettings(max_attempts=2, backoff_s=0.01)
ROUTES = {"judge": RouteSpec(policy="jury", stages=("grade",))}
SAID = " I say 0.75<|im_end|>"
SAMPLED = len(TinyTokenizer().encode(SAID))
TURNS, TOKENS = 3, 120
"""Of an episode of the policy's own engine."""


@dataclass
class Jury:
    """A judge on an engine of its own, which may be killed."""

    engine: ScriptedEngine
    url: str
    life: AsyncExitStack

    @property
    def asked(self) -> list[str]:
        """What it was asked by graders: the probes of its registration are no questions."""
        decode = TinyTokenizer().decode
        texts = [decode(list(request.token_ids)) for request in self.engine.seen]
        return [text for text in texts if "Rate from 0 to 1" in text]

    async def die(self) -> None:
        await self.life.aclose()


def marks(prompt_ids: list[int]) -> Reply:
    """0.75 for the answer 42, 0.25 for any other."""
    tokenizer = TinyTokenizer()
    right = "42" in tokenizer.decode(prompt_ids).partition("answer:")[2]
    return Reply(token_ids=tuple(tokenizer.encode(SAID if right else SAID.replace("7", "2"))))


@pytest.fixture
async def jury() -> AsyncIterator[Jury]:
    engine = ScriptedEngine(marks, label="0")
    async with AsyncExitStack() as life:
        url = await life.enter_async_context(serving(ScriptedApp(engine)))
        yield Jury(engine, url, life)


async def a_run(client: Client, backend_url: str, jury: Jury, **settings: object) -> RunHandle:
    await add_policy(client, backend_url)
    await add_policy(client, jury.url, name="jury")
    return await client.open_run(OpenRun.model_validate({"policy": "tiny", "retry": RETRY, **settings}))


async def graded_by(run: RunHandle, grader: str, wall_s: float = 600) -> FinishedGroup:
    limits = Limits(run_s=60, command_s=20, wall_s=wall_s)
    task = shell_task(grader=GraderSpec(name=f"my_graders:{grader}"), limits=limits)
    await run.submit([task], num_rollouts=1)
    (group,) = await finished(run, 1)
    return group


async def tokens_of(run: RunHandle) -> dict[str, int]:
    return {name: bin_.tokens for name, bin_ in (await run.status()).bins["tokens"].items()}


async def test_the_reward_is_the_judges_and_its_calls_are_no_samples(
    server: Server, backend_url: str, engine: ScriptedEngine, jury: Jury
) -> None:
    async with server.client() as client:
        run = await a_run(client, backend_url, jury, routes=ROUTES)
        for grader in ("judged", "lenient"):
            (rollout,) = (await graded_by(run, grader)).rollouts
            assert rollout.rollout.state is RolloutState.COMPLETED, rollout.rollout.failure
            assert rollout.reward == 0.75
            (sample,) = rollout.samples
            assert (sample.policy, len(sample.call_ids)) == ("", TURNS)
            assert (sample.loss_mask.sum(), sample.rewards.sum()) == (TOKENS, 0.75)
            attempt = (await client.rollout(rollout.rollout.id)).last_attempt
            assert attempt is not None
            assert attempt.counts["sampled_tokens"] == TOKENS + SAMPLED
        assert len(jury.asked) == 2
        assert await tokens_of(run) == {"delivered": 2 * TOKENS, "left_out": 2 * SAMPLED}


async def test_a_judge_that_fails_is_a_graders_failure_tried_again_and_no_reward(
    server: Server, backend_url: str, jury: Jury
) -> None:
    async with server.client() as client:
        run = await a_run(client, backend_url, jury, routes=ROUTES)
        jury.engine.faults.extend([Fault(kind="status", status=500)] * 200)
        await unjudged(client, await graded_by(run, "lenient"))
        assert await tokens_of(run) == {"retried": TOKENS, "failed": TOKENS}


async def test_a_judge_that_is_dead_is_one_too_when_its_time_is_over(
    server: Server, backend_url: str, jury: Jury
) -> None:
    async with server.client() as client:
        run = await a_run(client, backend_url, jury, routes=ROUTES)
        await jury.die()
        await unjudged(client, await graded_by(run, "judged", wall_s=8))


async def unjudged(client: Client, group: FinishedGroup) -> None:
    (rollout,) = group.rollouts
    assert (rollout.rollout.state, rollout.reward, rollout.samples) == (RolloutState.FAILED, None, [])
    tries = [attempt async for attempt in client.attempts(rollout.rollout.id)]
    failures = [attempt.failure for attempt in tries if attempt.failure is not None]
    assert [failure.kind for failure in failures] == [FailureKind.GRADER] * 2, failures


async def test_a_stored_attempt_is_judged_once_more_and_the_policy_is_not_run(
    server: Server, backend_url: str, engine: ScriptedEngine, jury: Jury
) -> None:
    async with server.client() as client:
        run = await a_run(client, backend_url, jury)
        await run.submit([shell_task()], num_rollouts=2)
        await finished(run, 1)
        before, started = await tokens_of(run), engine.started
        grader, routes = GraderSpec(name="my_graders:judged"), {"judge": "jury"}
        regrade = await run.regrade(grader, routes=routes)
        while (counts := (await client.regrade(regrade.id)).counts)["graded"] < 2:
            await asyncio.sleep(0.05)
            assert not counts["failed"], [each async for each in client.gradings(regrade.id)]
        found = [each async for each in client.gradings(regrade.id)]
        assert [(each.before, each.reward) for each in found] == [(1.0, 0.75)] * 2
        assert [each.graded.detail["said"].strip() for each in found if each.graded] == ["I say 0.75"] * 2
        assert len(jury.asked) == 2
        assert engine.started == started
        assert await tokens_of(run) == {**before, "regraded": 2 * SAMPLED}
        left = [path.name for path in server.folder.rglob("*") if path.name.startswith("reg_")]
        assert left == []
        await jury.die()
        with pytest.raises(InvalidInput, match="no backend that could answer") as caught:
            await run.regrade(grader, routes=routes)
        assert caught.value.field == "routes.judge.policy"
        states = {each.state async for each in client.gradings(regrade.id)}
        assert states == {RegradingState.GRADED}
