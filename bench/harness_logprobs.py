"""Real harnesses on a real model, and sampler against scorer on what they make of it.

``python bench/harness_logprobs.py --from FOLDER [--smollm2 FOLDER] [NAME…]``; ``./scripts/harnesses --backend
local|vllm`` sets all of it up. Each harness is asked to edit a file, in a sandbox; then each sample is scored
again, by prompt logprobs. A wrong template, or ids that were tokenized again, would show as a number.

Without ``--smollm2`` the local server samples from a Qwen3 of random weights. With it, vLLM on the CPU
samples from SmolLM2-135M-Instruct (``bench/smollm2.py`` fills the folder): real text, but a model of that
size calls no tools, and its own chat template shows it none. So no harness gets its file edited: an episode
is as long as its harness asks again. It was trained on contexts of 8,192 tokens, which qwen-code's first
prompt is over, and is served here with four times as many: what it says behind the 8,192nd is no better for
it, and whether sampler and scorer agree on its probability is the same question.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rollserve.agent.harness.table import HARNESSES
from rollserve.cli.processes import Processes
from rollserve.client import Client
from rollserve.errors import InfrastructureFailure, RollserveError
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import SamplingSettings
from rollserve.records.task import Limits
from rollserve.testing.harness_trial import POLICY, Trial, attempt, service
from rollserve.trainers.tiny.model import ModelSize, make_model, save_model
from rollserve.wire import CreatePolicy, RegisterBackend

CALL_S = 900.0
"""A prompt of 16,000 tokens is scored in minutes."""
LIMITS = Limits(run_s=900.0, memory_mb=16384, processes=1024, max_turns=4)
LEAST_TOLD = 131_072
"""Of the context: qwen-code does not begin with less. The gateway refuses what is more than there is."""
COLUMNS = (
    *("harness", "dialect", "how it ended", "calls", "labels", "exact", "sequences", "untrainable"),
    *("compared", "mean", "max", "findings"),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is sampled from: the server's command and name for it, and how messages become its ids.
    ``answer_tokens`` is the most a reply may have (Codex takes one that was cut off for a fault)."""

    command: tuple[str, ...]
    tokenizer: Path
    renderer: RendererSpec
    context_tokens: int
    answer_tokens: int
    env: dict[str, str]


@dataclass(kw_only=True)
class Scores:
    """``mean`` and ``largest`` are of |recorded - scored| over ``compared`` trained tokens; ``wrong`` counts
    what the check of the samples found, ``unscored`` says why some could not be."""

    trial: Trial
    compared: int = 0
    total: float = 0.0
    largest: float = 0.0
    wrong: int = 0
    unscored: tuple[str, ...] = ()

    def row(self) -> str:
        of = self.trial
        mean = f"{self.total / self.compared:.1e}" if self.compared else "-"
        exact = f"{of.trained / of.sampled:.1%}" if of.sampled else "-"
        labels, lost = (
            ", ".join(f"{count} {name}" for name, count in sorted(each.items())) or "0"
            for each in (of.labels, of.lost)
        )
        ended = "completed" if of.completed else of.why
        found = "; ".join([str(self.wrong), *self.unscored])
        begun = (of.harness, of.dialect, ended, of.calls, labels, exact, of.sequences, lost)
        return _line(*begun, self.compared, mean, f"{self.largest:.1e}", found)


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def random_model(folder: Path) -> Model:
    """A Qwen3 of random weights on the local server."""
    size = ModelSize(context=40_000)
    save_model(make_model(size), folder)
    return Model(
        command=(
            *(sys.executable, "-m", "rollserve.localserver", "--model", str(folder)),
            *("--served-model-name", POLICY, "--max-batch", "2", "--threads", "2"),
        ),
        tokenizer=folder,
        renderer=RendererSpec(name="qwen3", options={"enable_thinking": False}),
        context_tokens=size.context,
        answer_tokens=4096,
        env={},
    )


def smollm2(folder: Path, python: Path) -> Model:
    """On vLLM, started as a module since the wheel's own command misses its name."""
    context = 32_768
    return Model(
        command=(
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--host", "127.0.0.1", "--served-model-name", POLICY, "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", str(context), "--enable-scale-out"),
            *("--hf-overrides", json.dumps({"max_position_embeddings": context})),
            *("--logprobs-mode", "processed_logprobs"),
        ),
        tokenizer=folder,
        renderer=RendererSpec(name="default"),
        context_tokens=context,
        answer_tokens=512,
        env={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
        },
    )


@asynccontextmanager
async def serving(model: Model, folder: Path) -> AsyncIterator[str]:
    """Its URL."""
    processes = Processes(folder / "model-logs")
    port = processes.port()
    try:
        url = f"http://127.0.0.1:{port}"
        running = processes.start("model", [*model.command, "--port", str(port)], model.env)
        await processes.wait_ready(running, f"{url}/health", 400)
        yield url
    finally:
        processes.stop()


async def scores_of(client: Client, name: str, model: Model, turns: int) -> Scores:
    """One that gives up on such a model (pi and Codex do, over a reply that was cut off) has samples all the
    same."""
    sampling = SamplingSettings(temperature=1.0, max_tokens=model.answer_tokens)
    trial = await attempt(
        client,
        name,
        sampling=sampling,
        limits=LIMITS.model_copy(update={"max_turns": turns}),
        context_tokens=max(model.context_tokens, LEAST_TOLD),
        max_tokens=model.answer_tokens,
        arguments="|| true",
    )
    found = Scores(trial=trial)
    checked = await client.verify(trial.rollout, score=True)
    found.wrong += not checked.ok
    reasons = {checked.note} if checked.note else set()
    for sample in checked.samples:
        if (difference := sample.difference) is not None:
            found.compared += difference.compared
            found.total += difference.mean * difference.compared
            found.largest = max(found.largest, difference.max)
        elif sample.not_scored:
            reasons.add(sample.not_scored)
    found.unscored = tuple(sorted(reasons))
    return found


async def measure(names: Sequence[str], harnesses: Path, model: Model, folder: Path, turns: int) -> None:
    print(f"{_line(*COLUMNS)}\n{_line(*('---' for _ in COLUMNS))}", flush=True)
    async with (
        serving(model, folder) as backend,
        service(harnesses, folder) as url,
        Client(url, timeout_s=CALL_S) as client,
    ):
        policy = CreatePolicy(
            name=POLICY, model=POLICY, tokenizer=str(model.tokenizer), renderer=model.renderer
        )
        await client.create_policy(policy)
        await client.register_backend(POLICY, RegisterBackend(url=backend, kind=BackendKind.VLLM))
        for name in names:
            try:
                print((await scores_of(client, name, model, turns)).row(), flush=True)
            except (RollserveError, TimeoutError) as error:
                print(_line(name, "-", f"not measured: {error!r}"[:200]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(HARNESSES), help="of harnesses (none: all)")
    parser.add_argument("--from", dest="folder", type=Path, required=True, help="the installed harnesses")
    parser.add_argument("--smollm2", type=Path, help="its folder: sample from it, with vLLM")
    parser.add_argument("--turns", type=int, default=LIMITS.max_turns, help="at most")
    parser.add_argument("--answer-tokens", type=int, help="at most (none: the model's)")
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollserve-logprobs-") as made:
        place = Path(made)
        place.chmod(0o711)  # sandboxes run as another user
        if options.smollm2 is None:
            model = random_model(place / "model")
        elif options.vllm_python.exists():
            model = smollm2(options.smollm2.absolute(), options.vllm_python)
        else:
            raise InfrastructureFailure(
                f"no vLLM environment at {options.vllm_python}", hint="./scripts/setup-vllm makes it"
            )
        if options.answer_tokens is not None:
            model = replace(model, answer_tokens=options.answer_tokens)
        asyncio.run(measure(options.names, options.folder.absolute(), model, place, options.turns))


if __name__ == "__main__":
    main()
