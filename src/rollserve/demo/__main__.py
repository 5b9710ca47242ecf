"""``python -m rollserve.demo``: a policy learns through the service, on this machine, in minutes."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rollserve import installing, stopping
from rollserve.build.catalogs import runtime_reports
from rollserve.build.data_dir import check_data_dir
from rollserve.cli.processes import Processes, Running
from rollserve.client import Client
from rollserve.config import Settings
from rollserve.demo.left import TRAINED, next_steps
from rollserve.demo.record import Follower, Record
from rollserve.demo.view import View
from rollserve.errors import InfrastructureFailure, RollserveError, UnknownName
from rollserve.records.rollout import RolloutState

OBSERVE_EVERY_S = 0.5
SAY_EVERY_S = 3.0
VLLM_PLUGIN = "rollserve_file"
UNSAFE_RUNTIME = "process"


@dataclass(frozen=True, kw_only=True)
class Options:
    backend: str
    seed: int
    steps: int
    output: Path
    runtime: str
    allow_unsafe: bool
    vllm_python: Path
    json: bool
    dynamic_sampling: bool
    mix: bool
    train_all: bool
    model: Path | None
    milestone: float | None


def parse(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="A policy learns to use a shell tool, through the service, on this machine, in minutes.",
    )
    parser.add_argument(
        "--backend",
        choices=["local", "vllm"],
        default="local",
        help="inference server (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the model and the tasks (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=150, help="at most this many gradient steps (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="folder for all it writes (default: %(default)s)",
    )
    parser.add_argument("--runtime", default="bubblewrap", help="sandbox runtime of the tasks")
    parser.add_argument(
        "--allow-unsafe",
        action="store_true",
        help="where the runtime does not work, use `process`, which isolates nothing: tool calls run as you",
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=Path(".venv-vllm/bin/python"),
        help="interpreter with vLLM (default: %(default)s)",
    )
    parser.add_argument(
        "--dynamic-sampling",
        action="store_true",
        help="let the server draw the tasks, leave out groups that teach nothing, stop what is not needed",
    )
    parser.add_argument(
        "--mix",
        action="store_true",
        help="train on tasks of which three in four are always solved or never (ends after --steps)",
    )
    parser.add_argument(
        "--train-all",
        action="store_true",
        help="compute gradients of groups that teach nothing too, as trainers do that do not look",
    )
    parser.add_argument(
        "--model", type=Path, help="start from this policy, as `rollserve.trainers.tiny` makes it"
    )
    parser.add_argument(
        "--milestone",
        type=float,
        metavar="RATE",
        help="afterwards, find the first policy version with this success rate, and what it took",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON at the end")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    if options.milestone is not None and not 0 < options.milestone <= 1:
        parser.error("--milestone is a success rate: above 0, at most 1")
    if options.model is not None and not (options.model / "config.json").exists():
        parser.error(f"--model: there is no model in {options.model}")
    return options


def check_extras() -> None:
    """Raises ``InfrastructureFailure`` where the extra ``demo`` is not installed."""
    for module in ("torch", "transformers", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise InfrastructureFailure(
                f"the demo needs {module}, which is not installed",
                hint=f"./scripts/demo installs what it needs; or {installing.extra('demo')}",
            )


def check_runtime(options: Options, console: Console) -> Options:
    """The options, with the runtime ``process`` where the one asked for does not work and
    ``--allow-unsafe`` was given. Raises ``InfrastructureFailure`` saying what to do otherwise."""
    reports = {report.name: report for report in runtime_reports(Settings(data_dir=options.output))}
    report = reports.get(options.runtime)
    if report is None:
        raise UnknownName("runtime", options.runtime, reports, field="--runtime")
    if not report.usable:
        trouble = f"the {report.name} runtime does not work on this machine: {report.detail}"
        if not options.allow_unsafe or report.name == UNSAFE_RUNTIME:
            raise InfrastructureFailure(
                trouble,
                hint=f"{report.remedy}; or, knowing that it isolates nothing, "
                "run `./scripts/demo --allow-unsafe`",
            )
        console.print(f"{trouble}; falling back to {UNSAFE_RUNTIME!r}", markup=False)
        options, report = replace(options, runtime=UNSAFE_RUNTIME), reports[UNSAFE_RUNTIME]
    if not report.isolated:
        warning = f"the runtime {report.name!r} is UNSAFE: what the model writes runs as you, on this machine"
        if not options.allow_unsafe:
            raise InfrastructureFailure(warning, hint="add --allow-unsafe to go on all the same")
        console.print(warning, style="bold red", markup=False)
    return options


class Demo:
    """Starts the processes, watches them, and reports."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._output = options.output
        for old in ("data", "model", "weights", "logs", TRAINED):
            shutil.rmtree(options.output / old, ignore_errors=True)
        self._processes = Processes(options.output / "logs")
        self._server_url = f"http://127.0.0.1:{self._processes.port()}"
        self._backend_url = f"http://127.0.0.1:{self._processes.port()}"
        self._record = Record()

    async def run(self) -> dict[str, Any]:
        try:
            await self._make_model()
            self._console.print("starting the inference server, the rollserve server and the trainer")
            backend = self._start_backend()
            server = self._start_server()
            await self._processes.wait_ready(server, f"{self._server_url}/readyz", 60)
            self._console.print(
                "the rollserve server is up; waiting for the inference server to load the model"
            )
            await self._processes.wait_ready(backend, f"{self._backend_url}/health", 300)
            self._console.print("both are up; the trainer starts, its first step takes a few seconds")
            progress = self._output / "progress.jsonl"
            progress.unlink(missing_ok=True)
            trainer = self._start_trainer(progress)
            async with Client(self._server_url) as client:
                await self._watch(trainer, Follower(progress), client)
                return await self._conclude(client)
        finally:
            self._processes.stop()

    async def _make_model(self) -> None:
        """A tiny policy, warm-started for a few seconds so that it has the skill and not the habit."""
        if self._options.model is not None:
            await asyncio.to_thread(shutil.copytree, self._options.model, self._model_dir)
            return
        started = time.monotonic()
        self._console.print(
            f"making and warm-starting a tiny policy (seed {self._options.seed}), half a minute to two"
        )
        command = [
            *(sys.executable, "-m", "rollserve.trainers.tiny"),
            *("--out", str(self._model_dir), "--seed", str(self._options.seed)),
        ]
        if self._options.mix:
            command.append("--mix")
        making = self._processes.start("model", command)
        await self._say_progress(making)
        self._processes.check()
        self._console.print(f"policy ready after {time.monotonic() - started:.0f} s")

    async def _say_progress(self, making: Running) -> None:
        """Until it has ended: its last words every few seconds."""
        begun = said_at = time.monotonic()
        while making.process.poll() is None:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            if now - said_at >= SAY_EVERY_S:
                said_at = now
                self._console.print(
                    f"  {now - begun:.0f} s: {making.tail(1) or 'loading PyTorch'}", markup=False
                )

    @property
    def _model_dir(self) -> Path:
        return self._output / "model"

    def _start_backend(self) -> Running:
        port = self._backend_url.rsplit(":", 1)[1]
        if self._options.backend == "vllm":
            return self._start_vllm(port)
        command = [
            *(sys.executable, "-m", "rollserve.localserver", "--model", str(self._model_dir)),
            *("--port", port, "--served-model-name", "demo", "--threads", "1"),
        ]
        return self._processes.start("inference-server", command)

    def _start_vllm(self, port: str) -> Running:
        """vLLM 0.32 on the CPU; started as a module since the wheel's own command misses its name."""
        if not self._options.vllm_python.exists():
            raise InfrastructureFailure(
                f"no vLLM environment at {self._options.vllm_python}", hint="./scripts/setup-vllm makes it"
            )
        command = [
            *(str(self._options.vllm_python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._model_dir), "--host", "127.0.0.1", "--port", port),
            *("--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "1024", "--enable-scale-out"),
            *("--logprobs-mode", "processed_logprobs"),
            *("--weight-transfer-config", json.dumps({"backend": VLLM_PLUGIN})),
        ]
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        return self._processes.start("inference-server", command, env)

    def _start_server(self) -> Running:
        port = self._server_url.rsplit(":", 1)[1]
        command = [
            *(sys.executable, "-m", "rollserve", "serve", "--port", port),
            *("--data-dir", str(self._output / "data"), "--runtime", self._options.runtime),
        ]
        if self._options.allow_unsafe:
            command.append("--allow-unsafe-runtime")
        return self._processes.start("server", command)

    def _start_trainer(self, progress: Path) -> Running:
        command = [
            *(sys.executable, "-m", "rollserve.demo.trainer"),
            *("--server", self._server_url, "--backend", self._backend_url),
            *("--kind", self._options.backend, "--model-dir", str(self._model_dir)),
            *("--progress", str(progress), "--seed", str(self._options.seed)),
            *("--steps", str(self._options.steps), "--runtime", self._options.runtime),
        ]
        for flag in ("dynamic_sampling", "mix", "train_all"):
            if getattr(self._options, flag):
                command.append(f"--{flag.replace('_', '-')}")
        if self._options.milestone is not None:
            command += ["--milestone", str(self._options.milestone)]
        env = {"OMP_NUM_THREADS": "1"}
        return self._processes.start("trainer", command, env)

    async def _watch(self, trainer: Running, follower: Follower, client: Client) -> None:
        """Until the trainer ends. Raises ``InfrastructureFailure`` when any process dies."""
        with View(self._console) as view:
            while True:
                ended = trainer.process.poll() is not None
                for event in follower.new():
                    self._record.take(event)
                self._processes.check()
                if ended:
                    return
                with suppress(RollserveError):
                    self._record.observe(await client.status())
                view.show(self._record)
                await asyncio.sleep(OBSERVE_EVERY_S)

    async def _conclude(self, client: Client) -> dict[str, Any]:
        from rollserve.demo import report  # matplotlib takes a second to import

        stuck = 0
        for state in (RolloutState.QUEUED, RolloutState.RUNNING):
            async for _ in client.rollouts(state=state.value):
                stuck += 1
        data = report.report(
            self._record,
            seed=self._options.seed,
            backend=self._options.backend,
            stuck=stuck,
            dynamic_sampling=self._options.dynamic_sampling,
            mix=self._options.mix,
        )
        report.picture(self._record, self._output / "learning.png")
        example = self._record.steps[-1]["example"]
        trajectory = report.readable(await client.trajectory(example))
        (self._output / "trajectory.txt").write_text(trajectory)
        report.write(data, Path("demo-report.json"))
        return data


def conclude(options: Options, data: dict[str, Any], console: Console) -> None:
    if options.json:
        print(json.dumps(data))
        return
    console.print(
        f"\nsuccess on fresh tasks: {data['success_rate_start']:.3f} → {data['success_rate_end']:.3f} "
        f"in {data['steps']} steps, {data['train_seconds']:.0f} s of training; "
        f"trainer idle {data['trainer_idle_share']:.0%}",
        soft_wrap=True,
    )
    console.print(f"picture:     {options.output / 'learning.png'}")
    console.print(f"trajectory:  {options.output / 'trajectory.txt'}")
    console.print("figures:     demo-report.json")
    console.print(f"model:       {options.output / TRAINED}")
    console.print("\nwhat to type next", style="bold")
    for title, commands in next_steps(options.output, allow_unsafe=options.allow_unsafe):
        console.print(f"  {title}", soft_wrap=True, markup=False)
        for command in commands:
            console.print(f"    {command}", soft_wrap=True, markup=False)


def main() -> int:
    options = parse()
    console = Console(stderr=options.json, highlight=False)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    stopping.end_as_interrupted()
    try:
        check_data_dir(options.output, "--output")
        options.output.mkdir(parents=True, exist_ok=True)
        check_extras()
        options = check_runtime(options, console)
        data = asyncio.run(Demo(options, console).run())
    except RollserveError as error:
        console.print(f"the demo stopped: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; every process of the demo has been ended")
        return 130
    conclude(options, data, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
