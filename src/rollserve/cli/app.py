"""The commands and their flags; what they do is in a module each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollserve import __version__
from rollserve.cli.edge import run_app, run_async
from rollserve.cli.image_app import app as image_app
from rollserve.cli.options import Config, Json, Key, Url, connection
from rollserve.cli.policy_app import app as policy_app
from rollserve.cli.run_app import app as runs_app

app = typer.Typer(
    name="rollserve",
    help="Rollouts as a service: multi-turn agent episodes for RL trainers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(runs_app, name="run")
app.add_typer(policy_app, name="policy")
app.add_typer(image_app, name="image")


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
    line: Annotated[
        int | None, typer.Option("--line", min=1, help="Of a file of many tasks, the one of this line.")
    ] = None,
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
    code_dir: Annotated[Path | None, typer.Option(help="Folder of your agents, graders, tools.")] = None,
    keep: Annotated[
        bool, typer.Option("--shell", help="Without a reward above 0, open a shell in the sandbox.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 1.0,
    harness_dir: Annotated[
        Path | None, typer.Option(help="Folder of installed harnesses; a server's when left out.")
    ] = None,
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
    from rollserve.cli.tasks import read_task
    from rollserve.cli.try_task import Target, try_task

    played = read_task(task, line)
    target = Target(
        where=connection(url, api_key),
        policy=policy,
        backend=backend,
        kind=kind,
        model=model,
        tokenizer=tokenizer,
        renderer=renderer,
        renderer_options=flags({}, renderer_option or [], flag="--renderer-option"),
        temperature=temperature,
    )
    overrides = flags(
        {
            "code_dir": code_dir,
            "workers.harness_dir": harness_dir,
            "workers.allow_unsafe_runtime": allow_unsafe_runtime or None,
        },
        [],
    )
    run_async(try_task(played, target, config=config, overrides=overrides, shell=keep, as_json=as_json))


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="One task a line (JSON lines; `-` reads standard input).")],
    policy: Annotated[
        str | None, typer.Option(help="Policy to roll out with; the run's, with --run.")
    ] = None,
    num_rollouts: Annotated[
        int, typer.Option("--num-rollouts", "-n", min=1, help="Rollouts of each task.")
    ] = 1,
    name: Annotated[str | None, typer.Option(help="Name of the new run.")] = None,
    run: Annotated[str | None, typer.Option(help="Submit to this open run instead of a new one.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the results and show progress.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Submit a file of tasks. With --wait: exit code 3 when a rollout failed, 4 when one was cancelled; the
    run that it opened is closed at the end."""
    from rollserve.cli.submit import Into
    from rollserve.cli.submit import submit as submit_
    from rollserve.cli.tasks import read_tasks

    into = Into.of(policy=policy, name=name, run_id=run)
    where, tasks = connection(url, api_key), read_tasks(file)
    run_async(submit_(where, tasks, into, num_rollouts, wait=wait, as_json=as_json))


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(help="A run; the server when left out.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """What the server, or one run, is doing."""
    from rollserve.cli.status import status as status_

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
    from rollserve.cli.show import show as show_

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
def evaluate(
    run: Annotated[str, typer.Argument(help="Id of a run.")],
    compare: Annotated[str | None, typer.Option("--compare", help="Id of a run to compare it with.")] = None,
    k: Annotated[str, typer.Option("--k", "-k", help="Of pass@k; several by comma: 1,4,8.")] = "1",
    threshold: Annotated[float, typer.Option(help="A rollout passes with this reward or more.")] = 1.0,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.9999, help="Of the intervals.")] = 0.95,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Mean reward and pass@k of a run, with intervals; or how it differs from another."""
    from rollserve.cli.evaluate import How
    from rollserve.cli.evaluate import evaluate as evaluate_

    how = How.of(k, threshold, confidence)
    run_async(evaluate_(connection(url, api_key), run, compare, how, as_json=as_json))


@app.command()
def callback(
    run: Annotated[str, typer.Argument(help="Id of a run with a callback.")],
    resend: Annotated[
        bool, typer.Option("--resend", help="Send what was given up again; a stopped callback goes on.")
    ] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """What a run's callback was sent, and what is stuck."""
    from rollserve.cli.callback import callback as callback_

    run_async(callback_(connection(url, api_key), run, resend=resend, as_json=as_json))


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
def regrade(
    run: Annotated[str, typer.Argument(help="Id of a run.")],
    grader: Annotated[str, typer.Option(help="A registered grader, or package.module:function.")],
    option: Annotated[
        list[str] | None, typer.Option("--option", help="Of the grader, e.g. answer=42; repeatable.")
    ] = None,
    route: Annotated[
        list[str] | None,
        typer.Option("--route", help="What the grader may ask, e.g. judge=policy; repeatable."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Show progress until it has ended.")] = True,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Grade a run's stored attempts once more; their own rewards stay. Exit code 1 if some can't be."""
    from rollserve.cli.replay import regrade as regrade_
    from rollserve.cli.replay import routes_of
    from rollserve.cli.settings import flags
    from rollserve.records.task import GraderSpec

    spec = GraderSpec(name=grader, options=flags({}, option or [], flag="--option"))
    routes = None if route is None else routes_of(flags({}, route, flag="--route"))
    run_async(regrade_(connection(url, api_key), run, spec, routes, wait=wait, as_json=as_json))


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="Id of a run.")],
    out: Annotated[Path | None, typer.Option(help="File of samples, one a line as JSON.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Otherwise than the run, e.g. sequences=calls; repeatable."),
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Make a run's samples anew from what was stored, without running a model."""
    from rollserve.cli.replay import export as export_
    from rollserve.cli.replay import settings_of
    from rollserve.cli.settings import flags

    settings = settings_of(flags({}, set_ or []))
    run_async(export_(connection(url, api_key), run, settings, out, as_json=as_json))


@app.command()
def cancel(
    target: Annotated[str, typer.Argument(help="Id of a rollout or a group.")],
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Cancel a rollout or a whole group."""
    from rollserve.cli.show import cancel as cancel_

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
    data_dir: Annotated[Path | None, typer.Option(help="The server's, if it is given one.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """What this machine can do, and how to mend what it can't."""
    from rollserve.cli.doctor import doctor as doctor_
    from rollserve.cli.settings import flags

    overrides = flags({"data_dir": data_dir}, [])
    run_async(doctor_(config, overrides, backend or [], as_json=as_json))


def run() -> None:
    run_app(app)
