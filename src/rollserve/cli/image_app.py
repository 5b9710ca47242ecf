"""``rollserve image …``: the commands and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollserve.cli.edge import run_async
from rollserve.cli.options import Config, Json

app = typer.Typer(help="Sandbox images: what is in the cache of this machine.", no_args_is_help=True)

Name = Annotated[str | None, typer.Option("--name", help="What tasks may call it.")]
DataDir = Annotated[Path | None, typer.Option(help="As of `rollserve serve`.")]


@app.command()
def add(
    reference: Annotated[
        str,
        typer.Argument(help="docker://HOST/NAME:TAG, or the path of an archive, layout, SIF or Dockerfile."),
    ],
    name: Name = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="From its source again, as a tag moves.")
    ] = False,
    data_dir: DataDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Fetch and unpack an image before a task needs it."""
    from rollserve.cli.image import add as add_
    from rollserve.cli.image import load

    run_async(add_(load(config, data_dir), reference, name=name, refresh=refresh, as_json=as_json))


@app.command()
def build(
    folder: Annotated[Path, typer.Argument(help="What COPY takes files from.")],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The recipe; FOLDER/Dockerfile without.")
    ] = None,
    name: Name = None,
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", help="NAME=VALUE for an ARG; repeatable.")
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="Give the RUN steps this machine's network.")
    ] = False,
    data_dir: DataDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Build a recipe (a subset of Dockerfiles) without root."""
    from rollserve.cli.image import build as build_
    from rollserve.cli.image import load, plan

    steps = plan(folder, file, build_arg or [], network=network)
    run_async(build_(load(config, data_dir), steps, name=name, as_json=as_json))


@app.command("list")
def list_(data_dir: DataDir = None, config: Config = None, as_json: Json = False) -> None:
    """What is there, the last used first."""
    from rollserve.cli.image import load, show

    run_async(show(load(config, data_dir), as_json=as_json))


@app.command()
def prune(
    max_gb: Annotated[
        float | None, typer.Option(min=0, help="Down to this size; images.max_gb without it.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that is not in use.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Remove what was not used for longest, and what nobody refers to."""
    from rollserve.cli.image import load
    from rollserve.cli.image import prune as prune_

    wanted = 0.0 if everything else max_gb
    run_async(prune_(load(config, data_dir), wanted, as_json=as_json))
