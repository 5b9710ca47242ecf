"""``rollserve run …``: the commands and their flags."""

from __future__ import annotations

from typing import Annotated

import typer

from rollserve.cli.edge import run_async
from rollserve.cli.options import Json, Key, Url, connection
from rollserve.records.run import RunState

app = typer.Typer(help="Runs: list, show, pause, resume, close.", no_args_is_help=True)

RunId = Annotated[str, typer.Argument(help="Id of a run.")]


@app.command("list")
def list_(
    state: Annotated[RunState | None, typer.Option(help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="So many, the newest first.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Go on after a list: what it said.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Runs with their age and counts, the newest first."""
    from rollserve.cli.runs import list_runs

    where = connection(url, api_key)
    run_async(list_runs(where, state=state, limit=limit, cursor=cursor, as_json=as_json))


@app.command()
def show(run: RunId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """One run: counts, some of its rollouts, what is in its way (`rollserve status RUN` is the same)."""
    from rollserve.cli.status import status

    run_async(status(connection(url, api_key), run, as_json=as_json))


@app.command()
def pause(run: RunId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Start no more of its rollouts; what runs goes on."""
    from rollserve.cli.runs import pause as pause_

    run_async(pause_(connection(url, api_key), run, as_json=as_json))


@app.command()
def resume(run: RunId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Let a paused run go on."""
    from rollserve.cli.runs import resume as resume_

    run_async(resume_(connection(url, api_key), run, as_json=as_json))


@app.command()
def close(run: RunId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Take no more groups and cancel what is queued or running. Final."""
    from rollserve.cli.runs import close as close_

    run_async(close_(connection(url, api_key), run, as_json=as_json))
