"""The token path end to end: what the sampler said and what the trainer computes are the same."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from rollserve.cli.processes import Processes
from rollserve.client import FinishedGroup
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import SamplingSettings
from rollserve.records.task import AgentSpec
from rollserve.trainers.batch import pad_batch
from rollserve.trainers.grpo import GRPOTrainer, Logits, token_logprobs
from rollserve.trainers.tiny.model import make_model, save_model
from rollserve.trainers.weights import LocalWeights
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend
from tests.integration.conftest import Server, shell_task


@pytest.fixture
async def local_server(tmp_path: Path) -> AsyncIterator[str]:
    """``rollserve.localserver`` with a tiny model of random weights (seed 3)."""
    save_model(make_model(seed=3), tmp_path / "model")
    processes = Processes(tmp_path / "logs")
    url = f"http://127.0.0.1:{processes.port()}"
    command = [
        *(sys.executable, "-m", "rollserve.localserver", "--model", str(tmp_path / "model")),
        *("--port", url.rsplit(":", 1)[1], "--served-model-name", "tiny-model"),
    ]
    try:
        await processes.wait_ready(processes.start("local", command), f"{url}/health", 90)
        yield url
    finally:
        processes.stop()


async def test_sampler_and_trainer_agree_on_every_token_and_versions_follow_the_weights(
    server: Server, local_server: str, tmp_path: Path
) -> None:
    model = make_model(seed=3)

    def logits(ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = model(input_ids=ids, attention_mask=attention).logits
        return scores

    async with server.client() as client:
        await client.create_policy(
            CreatePolicy(
                name="p",
                model="tiny-model",
                tokenizer=str(tmp_path / "model"),
                renderer=RendererSpec(name="qwen3", options={"enable_thinking": False}),
            )
        )
        await client.register_backend("p", RegisterBackend(url=local_server, kind=BackendKind.LOCAL))
        sync = LocalWeights(local_server, tmp_path / "weights")
        await sync.push(model.state_dict(), 0)
        await client.set_version("p", 0)
        run = await client.open_run(OpenRun(policy="p", sampling=SamplingSettings(max_tokens=24)))
        task = shell_task(agent=AgentSpec(name="my_agents:Chatter"))

        async def rolled_out() -> FinishedGroup:
            await run.submit([task], num_rollouts=8)
            async with aclosing(run.groups()) as groups:
                group = await anext(groups)
                await group.ack()
            return group

        before = await rolled_out()
        assert_agreement(before, logits, version=0)
        graded = Rewarded(before)
        trainer = GRPOTrainer(logits, list(model.parameters()), torch.optim.Adam(model.parameters(), lr=1e-2))
        stats = trainer.step([graded])
        assert stats is not None
        assert stats.ratio_error < 1e-3
        assert trainer.version == 1
        await sync.push(model.state_dict(), 1)
        await client.set_version("p", 1)
        after = await rolled_out()
        assert_agreement(after, logits, version=1)


class Rewarded:
    """The group, with rewards that differ."""

    def __init__(self, group: FinishedGroup) -> None:
        self.samples = group.samples
        self.rewards: list[float | None] = [float(i % 2) for i in range(len(group.rollouts))]


def assert_agreement(group: FinishedGroup, logits: Logits, *, version: int) -> None:
    samples = group.samples
    assert len(samples) == 8
    assert all(sample.exact and len(sample.call_ids) == 3 for sample in samples)
    batch = pad_batch(samples, [0.0] * len(samples))
    with torch.no_grad():
        ours = token_logprobs(logits, batch.ids, batch.attention)
    worst = (ours - batch.old_logprobs).abs()[batch.loss_mask].max()
    assert float(worst) < 1e-3
    assert set(batch.versions[batch.loss_mask].tolist()) == {version}
    assert int(batch.loss_mask.sum()) > 8 * 24
