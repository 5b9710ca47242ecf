"""Whole episodes through the service, on real parts."""

from __future__ import annotations

import numpy as np

from rollserve.errors import FailureKind
from rollserve.records.rollout import RolloutState
from rollserve.records.task import AgentSpec, GraderSpec, Limits
from rollserve.tiny_tokenizer import TinyTokenizer
from tests.integration.conftest import Server, one


async def test_a_shell_episode_is_graded_and_its_sample_is_token_exact(
    shared_server: Server, backend_url: str
) -> None:
    async with shared_server.client() as client:
        group = await one(client, backend_url)
        (rollout,) = group.rollouts
        assert rollout.rollout.state is RolloutState.COMPLETED
        assert rollout.reward == 1.0
        (sample,) = rollout.samples
        trajectory = await client.trajectory(rollout.rollout.id)
    text = TinyTokenizer().decode([int(i) for i in sample.ids])
    assert text.count("<tool_response>\nthe answer is 42\n/workspace\n</tool_response>") == 2
    assert len(sample.call_ids) == 3
    assert sample.loss_mask.sum() == 120
    assert (sample.versions[sample.loss_mask] == 0).all()
    assert (sample.versions[~sample.loss_mask] == -1).all()
    assert np.isfinite(sample.logprobs).all()
    assert sample.rewards.sum() == 1.0
    assert [message["role"] for message in trajectory["conversation"]] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant")
    ]


async def test_an_agent_of_the_user_drives_the_model_with_the_openai_client(
    shared_server: Server, backend_url: str
) -> None:
    agent = AgentSpec(name="my_agents:OpenAIAgent", options={"temperature": 0.3})
    grader = GraderSpec(name="my_agents:half")
    async with shared_server.client() as client:
        group = await one(client, backend_url, agent=agent, grader=grader)
        (rollout,) = group.rollouts
        assert rollout.reward == 0.5, rollout.rollout.failure
        (sample,) = rollout.samples
        assert len(sample.call_ids) == 3
        attempt = (await client.rollout(rollout.rollout.id)).last_attempt
        assert attempt is not None
    assert set(attempt.code) == {"my_agents:OpenAIAgent", "my_agents:half"}
    assert all(version.startswith("sha256:") for version in attempt.code.values())


async def test_an_agent_over_http_that_breaks_on_a_limit_is_truncated_and_graded(
    shared_server: Server, backend_url: str
) -> None:
    agent = AgentSpec(name="my_agents:OpenAIAgent")
    async with shared_server.client() as client:
        group = await one(client, backend_url, agent=agent, limits=Limits(max_turns=2))
    (rollout,) = group.rollouts
    assert rollout.rollout.state is RolloutState.COMPLETED, rollout.rollout.failure
    assert rollout.rollout.truncated_by == "max_turns"
    assert rollout.reward == 0.0


async def test_a_crashing_agent_is_a_failure_and_no_reward(shared_server: Server, backend_url: str) -> None:
    async with shared_server.client() as client:
        group = await one(client, backend_url, agent=AgentSpec(name="my_agents:Crasher"))
        (rollout,) = group.rollouts
        assert rollout.rollout.state is RolloutState.FAILED
        assert rollout.reward is None
        assert rollout.rollout.failure is not None
        assert rollout.rollout.failure.kind is FailureKind.AGENT
        assert "the agent has a bug" in rollout.rollout.failure.message
        assert (await client.rollout(rollout.rollout.id)).attempts == 1


async def test_a_spinning_agent_is_killed_and_what_it_did_is_marked(
    shared_server: Server, backend_url: str
) -> None:
    async with shared_server.client() as client:
        limits = Limits(run_s=1.0)
        group = await one(client, backend_url, agent=AgentSpec(name="my_agents:Spinner"), limits=limits)
    (rollout,) = group.rollouts
    assert rollout.rollout.truncated_by == "run_s"
    assert rollout.rollout.state is RolloutState.COMPLETED
    assert rollout.reward == 0.0


async def test_a_broken_grader_is_tried_again_and_never_a_zero(
    shared_server: Server, backend_url: str
) -> None:
    async with shared_server.client() as client:
        group = await one(client, backend_url, grader=GraderSpec(name="my_agents:broken"))
        (rollout,) = group.rollouts
        assert rollout.reward is None
        assert rollout.rollout.failure is not None
        assert rollout.rollout.failure.kind is FailureKind.GRADER
        assert (await client.rollout(rollout.rollout.id)).attempts == 2


async def test_a_command_grader_sees_the_files_in_a_fresh_sandbox(
    shared_server: Server, backend_url: str
) -> None:
    grader = GraderSpec(
        name="command", options={"command": "grep -q 42 note && test ! -e /tmp/left", "carry": ["/workspace"]}
    )
    async with shared_server.client() as client:
        group = await one(client, backend_url, grader=grader, artifacts=["note"])
        (rollout,) = group.rollouts
        assert rollout.reward == 1.0


async def test_turn_limit_keeps_what_was_done(shared_server: Server, backend_url: str) -> None:
    async with shared_server.client() as client:
        group = await one(client, backend_url, limits=Limits(max_turns=2))
    (rollout,) = group.rollouts
    assert rollout.rollout.truncated_by == "max_turns"
    assert rollout.reward == 0.0
    (sample,) = rollout.samples
    assert sample.truncated_by == "max_turns"
    assert sample.loss_mask.sum() == 80
