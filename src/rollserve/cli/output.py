"""What every command prints with: people on stderr or a table, scripts with ``--json`` on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

_WIDEST = 10_000
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, default=str) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """As wide as it is: an id that was cut off can't be copied."""
    grid = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        grid.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    wide = Console(highlight=False, width=_WIDEST)
    wide.width = Measurement.get(wide, wide.options, grid).maximum
    wide.print(grid)


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def duration(seconds: float) -> str:
    """For people: ``12 s``, ``3 min``, ``5 h``, ``2 d``; under a minute of work ``0.4 s``."""
    for unit_s, name in _UNITS:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{max(0.0, seconds):.1f} s"


def local_time(at: float) -> str:
    """ISO 8601 in the time zone of this machine; ``at`` is Unix time."""
    return datetime.fromtimestamp(at, UTC).astimezone().isoformat(sep=" ", timespec="seconds")


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def fail(message: str, *, hint: str | None = None) -> None:
    err.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    if hint:
        err.print(f"hint:  {hint}", markup=False, soft_wrap=True)
