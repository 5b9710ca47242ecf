"""The commands and their flags; what they do is in a module each."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from rollserve import __version__
from rollserve.cli.image_app import app as image_app
from rollserve.cli.options import Config, Json
from rollserve.cli.output import fail
from rollserve.config import client_environment
from rollserve.errors import RollserveError

app = typer.Typer(
    name="rollserve",
    help="Rollouts as a service: multi-turn agent episodes for RL trainers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(image_app, name="image")

DEFAULT_URL = "http://127.0.0.1:8700"
Url = Annotated[str | None, typer.Option("--url", help=f"Server; else ROLLSERVE_URL, else {DEFAULT_URL}.")]
Key = Annotated[str | None, typer.Option("--api-key", help="API key; else ROLLSERVE_API_KEY.")]


def connection(url: str | None, key: str | None) -> tuple[str, str | None]:
    """Flags win over the environment, and that over the default."""
    env_url, env_key = client_environment()
    return url or env_url or DEFAULT_URL, key or env_key


def run_async(work: Coroutine[Any, Any, int | None]) -> None:
    code = asyncio.run(work)
    if code:
        raise typer.Exit(code)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Rollouts as a service: multi-turn agent episodes for RL trainers."""


@app.command()
def serve(
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Database, payloads and logs.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes.")] = None,
    runtime: Annotated[str | None, typer.Option(help="Default sandbox runtime.")] = None,
    code_dir: Annotated[Path | None, typer.Option(help="Folder of your agents, graders, tools.")] = None,
    allow_unsafe_runtime: Annotated[
        bool, typer.Option("--allow-unsafe-runtime", help="Accept a runtime that isolates nothing.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, e.g. workers.run_slots=128; repeatable.")
    ] = None,
) -> None:
    """Start the server and its workers on this machine."""
    from rollserve.cli.serve import serve as serve_
    from rollserve.cli.settings import flags

    overrides = flags(
        {
            "api.host": host,
            "api.port": port,
            "data_dir": data_dir,
            "code_dir": code_dir,
            "workers.count": workers,
            "workers.runtime": runtime,
            "workers.allow_unsafe_runtime": allow_unsafe_runtime or None,
        },
        set_ or [],
    )
    serve_(config, overrides)


@app.command("try")
def try_(
    task: Annotated[Path, typer.Argument(help="A task as JSON (`-` reads standard input).")],
    policy: Annotated[str | None, typer.Option(help="A policy of the server at --url.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Or: an inference server's URL, without any rollserve server.")
    ] = None,
    kind: Annotated[str, typer.Option(help="Kind of --backend.")] = "vllm",
    model: Annotated[str | None, typer.Option(help="Name --backend serves.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer of --model: folder or hub name.")] = None,
    renderer: Annotated[str, typer.Option(help="Renderer of --model.")] = "qwen3",
    renderer_option: Annotated[
        list[str] | None,
        typer.Option("--renderer-option", help="Of --renderer, e.g. enable_thinking=false; repeatable."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--shell", help="Without a reward above 0, open a shell in the sandbox.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    allow_unsafe_runtime: Annotated[
        bool, typer.Option("--allow-unsafe-runtime", help="Accept a runtime that isolates nothing.")
    ] = False,
    config: Config = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Run one rollout here, with live output."""
    from rollserve.cli.settings import flags
    from rollserve.cli.try_task import Target, try_task

    target = Target(
        url=connection(url, api_key)[0],
        api_key=connection(url, api_key)[1],
        policy=policy,
        backend=backend,
        kind=kind,
        model=model,
        tokenizer=tokenizer,
        renderer=renderer,
        renderer_options=flags({}, renderer_option or [], flag="--renderer-option"),
        temperature=temperature,
    )
    unsafe = allow_unsafe_runtime
    run_async(try_task(task, target, config=config, shell=keep, allow_unsafe=unsafe, as_json=as_json))


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="One task a line (JSON lines; `-` reads standard input).")],
    policy: Annotated[str, typer.Option(help="Policy to roll out with.")],
    num_rollouts: Annotated[int, typer.Option("--num-rollouts", "-n", help="Rollouts of each task.")] = 1,
    name: Annotated[str | None, typer.Option(help="Name of the new run.")] = None,
    run: Annotated[str | None, typer.Option(help="Submit to this open run instead of a new one.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the results and show progress.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Submit a file of tasks."""
    from rollserve.cli.talk import submit as submit_

    where = connection(url, api_key)
    run_async(submit_(where, file, policy, num_rollouts, name=name, run_id=run, wait=wait, as_json=as_json))


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(help="A run; the server when left out.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """What the server, or one run, is doing."""
    from rollserve.cli.talk import status as status_

    run_async(status_(connection(url, api_key), run, as_json=as_json))


@app.command()
def show(
    rollout: Annotated[str, typer.Argument(help="Id of a rollout.")],
    log: Annotated[bool, typer.Option("--log", help="The log of its last attempt too.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """One rollout: state, attempts, conversation."""
    from rollserve.cli.talk import show as show_

    run_async(show_(connection(url, api_key), rollout, log=log, as_json=as_json))


@app.command()
def drift(
    target: Annotated[str, typer.Argument(help="Id of a run, or of a rollout.")],
    cause: Annotated[str | None, typer.Option(help="Only what has this cause.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Where tokens differ from what agents sent or backends consumed, and what it costs."""
    from rollserve.cli.drift import drift as drift_

    run_async(drift_(connection(url, api_key), target, cause=cause, as_json=as_json))


@app.command()
def verify(
    target: Annotated[str, typer.Argument(help="Id of a rollout, or of a run: its finished rollouts.")],
    score: Annotated[
        bool, typer.Option("--score/--no-score", help="Ask a backend for the tokens' logprobs again.")
    ] = True,
    backend: Annotated[str | None, typer.Option(help="Id of the backend to ask.")] = None,
    max_difference: Annotated[float, typer.Option(min=0, help="Of one token's logprob.")] = 1.0,
    mean_difference: Annotated[float, typer.Option(min=0, help="Of a sample's, on average.")] = 0.05,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Are the samples what they say they are? Exit code 1 when not."""
    from rollserve.cli.verify import verify as verify_

    work = verify_(
        connection(url, api_key),
        target,
        as_json=as_json,
        score=score,
        backend_id=backend,
        max_difference=max_difference,
        mean_difference=mean_difference,
    )
    run_async(work)


@app.command()
def cancel(
    target: Annotated[str, typer.Argument(help="Id of a rollout or a group.")],
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Cancel a rollout or a whole group."""
    from rollserve.cli.talk import cancel as cancel_

    run_async(cancel_(connection(url, api_key), target, as_json=as_json))


@app.command()
def bench(
    episodes: Annotated[int, typer.Option(min=1, max=100_000, help="Concurrent episodes.")] = 512,
    turns: Annotated[int, typer.Option(min=1, max=1000, help="Model calls of each.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens sampled by each call.")] = 200,
    latency_ms: Annotated[float, typer.Option(min=0, help="The scripted backend's latency.")] = 50.0,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")] = 1,
    runtime: Annotated[str, typer.Option(help="`none` leaves sandboxes out.")] = "none",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Times all episodes are run; medians.")] = 3,
    as_json: Json = False,
) -> None:
    """Load this machine with scripted episodes: what the service costs, without a GPU."""
    from rollserve.cli.bench import BenchPlan
    from rollserve.cli.bench import bench as bench_

    plan = BenchPlan(
        episodes=episodes,
        turns=turns,
        tokens=tokens,
        latency_ms=latency_ms,
        workers=workers,
        runtime=runtime,
        rounds=rounds,
    )
    run_async(bench_(plan, as_json=as_json))


@app.command()
def doctor(
    backend: Annotated[list[str] | None, typer.Option(help="URL of a backend to look at.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """What this machine can do, and how to mend what it can't."""
    from rollserve.cli.doctor import doctor as doctor_

    run_async(doctor_(config, backend or [], as_json=as_json))


def run() -> None:
    """Errors of ours are one line and exit code 1; anything else is a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what a command started ends with it
    try:
        app()
    except RollserveError as error:
        where = f"{error.field}: " if error.field else ""
        fail(f"{where}{error.message}", hint=error.hint)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
