"""``rollserve policy …``: the commands and their flags."""

from __future__ import annotations

from typing import Annotated

import typer

from rollserve.cli.edge import run_async
from rollserve.cli.options import Json, Key, Url, connection
from rollserve.records.policy import BackendKind

app = typer.Typer(
    help="Policies: create, give them backends, list, show, pause, resume.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Name of a policy.")]


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, max=100, help="So many, by name.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Go on after a list: what it said.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Policies and how many backends each has."""
    from rollserve.cli.policies import list_policies

    run_async(list_policies(connection(url, api_key), limit=limit, cursor=cursor, as_json=as_json))


@app.command()
def show(name: Name, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """One policy: version, model, backends, what is in its way."""
    from rollserve.cli.policies import show as show_

    run_async(show_(connection(url, api_key), name, as_json=as_json))


@app.command()
def create(
    name: Name,
    model: Annotated[str, typer.Option(help="Name that its backends serve it under.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder, as the server sees it, or hub name."),
    ] = None,
    renderer: Annotated[str, typer.Option(help="Messages to token ids, by family of models.")] = "qwen3",
    renderer_option: Annotated[
        list[str] | None,
        typer.Option("--renderer-option", help="Of --renderer, e.g. enable_thinking=false; repeatable."),
    ] = None,
    kind: Annotated[BackendKind, typer.Option(help="Kind of the backends it will have.")] = BackendKind.VLLM,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Make a policy. The same again changes nothing."""
    from rollserve.cli.policies import create as create_
    from rollserve.cli.settings import flags
    from rollserve.records.policy import RendererSpec
    from rollserve.wire import CreatePolicy

    options = flags({}, renderer_option or [], flag="--renderer-option")
    spec = CreatePolicy(
        name=name,
        model=model,
        tokenizer=tokenizer,
        interface=kind.interface,
        renderer=RendererSpec(name=renderer, options=options),
    )
    run_async(create_(connection(url, api_key), spec, as_json=as_json))


@app.command("add-backend")
def add_backend(
    name: Name,
    backend: Annotated[str, typer.Argument(help="URL of an inference server: its root, without /v1.")],
    kind: Annotated[BackendKind, typer.Option(help="What it is.")] = BackendKind.VLLM,
    backend_key: Annotated[str | None, typer.Option(help="Key that it wants.")] = None,
    images: Annotated[bool, typer.Option("--images", help="Its model takes images in messages.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Register an inference server. The server looks at it first."""
    from rollserve.cli.policies import add_backend as add_backend_
    from rollserve.wire import RegisterBackend

    secret = {"api_key": backend_key} if backend_key else {}
    accepts = ["text", "image"] if images else ["text"]
    spec = RegisterBackend.model_validate({"url": backend, "kind": kind, "accepts": accepts, **secret})
    run_async(add_backend_(connection(url, api_key), name, spec, as_json=as_json))


BackendId = Annotated[str, typer.Argument(metavar="ID_OR_URL", help="Id or URL of one of its backends.")]


@app.command("remove-backend")
def remove_backend(
    name: Name, backend: BackendId, url: Url = None, api_key: Key = None, as_json: Json = False
) -> None:
    """Forget an inference server. Calls that it is answering go to another one."""
    from rollserve.cli.policies import remove_backend as remove_backend_

    run_async(remove_backend_(connection(url, api_key), name, backend, as_json=as_json))


@app.command("drain-backend")
def drain_backend(
    name: Name, backend: BackendId, url: Url = None, api_key: Key = None, as_json: Json = False
) -> None:
    """Send an inference server no more calls; those that it is answering end there."""
    from rollserve.cli.policies import drain_backend as drain_backend_

    run_async(drain_backend_(connection(url, api_key), name, backend, as_json=as_json))


@app.command()
def pause(name: Name, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Start no rollout and make no model call of it, until resumed."""
    from rollserve.cli.policies import set_paused

    run_async(set_paused(connection(url, api_key), name, True, as_json=as_json))


@app.command()
def resume(name: Name, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Let a paused policy go on."""
    from rollserve.cli.policies import set_paused

    run_async(set_paused(connection(url, api_key), name, False, as_json=as_json))
