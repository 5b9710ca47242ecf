"""Flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file (TOML); else ROLLSERVE_CONFIG, else ./rollserve.toml."),
]
