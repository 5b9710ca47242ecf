"""Flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollserve.config import client_environment

Where = tuple[str, str | None]
"""A server's URL, and the key for it."""

DEFAULT_URL = "http://127.0.0.1:8700"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file (TOML); else ROLLSERVE_CONFIG, else ./rollserve.toml."),
]
Url = Annotated[str | None, typer.Option("--url", help=f"Server; else ROLLSERVE_URL, else {DEFAULT_URL}.")]
Key = Annotated[str | None, typer.Option("--api-key", help="API key; else ROLLSERVE_API_KEY.")]


def connection(url: str | None, key: str | None) -> Where:
    """Flags win over the environment, and that over the default."""
    env_url, env_key = client_environment()
    return url or env_url or DEFAULT_URL, key or env_key
