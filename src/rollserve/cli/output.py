"""What every command prints with: people on stderr or a table, scripts with ``--json`` on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, default=str) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    grid = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        grid.add_row(*("" if cell is None else str(cell) for cell in row))
    out.print(grid)


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def fail(message: str, *, hint: str | None = None) -> None:
    err.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    if hint:
        err.print(f"hint:  {hint}", markup=False, soft_wrap=True)
