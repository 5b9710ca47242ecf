"""The live view in the terminal: a panel where there is one, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollserve.demo.record import Record

SPARKS = "▁▂▃▄▅▆▇█"
LINE_EVERY_S = 5.0


def sparkline(values: list[float], width: int = 48) -> str:
    """Values in [0, 1], the last ``width`` of them."""
    return "".join(SPARKS[min(7, max(0, int(value * 8)))] for value in values[-width:])


def bar(share: float, width: int = 20) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def _stage_rows(record: Record) -> list[tuple[str, str]]:
    if not record.moments:
        return []
    now = record.moments[-1]
    rows = []
    for stage in ("init", "ready", "run", "grade"):
        used, size = now.stages.get(stage, 0), max(1, now.slots.get(stage, 1))
        rows.append((f"stage {stage}", f"{bar(used / size)} {used}/{size}"))
    rows.append(("backend", f"{now.backend_in_flight} calls in flight, {record.tokens_per_s():.0f} tokens/s"))
    return rows


def _phase(record: Record) -> str:
    if record.evaluating:
        event = record.evaluating
        return f"evaluating ({event['when']}): {event['done']}/{event['of']}"
    if record.trained:
        return "evaluating the trained policy"
    return f"training, step {len(record.steps)}" if record.run_id else "starting"


def render(record: Record) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("phase", _phase(record))
    if record.steps:
        last = record.steps[-1]
        stats = last["stats"] or {}
        rewards = [float(step["reward"]) for step in record.steps]
        table.add_row("reward", f"{rewards[-1]:.2f}  {sparkline(rewards)}")
        table.add_row("policy version", str(last["version"]))
        staleness = f"mean {stats.get('staleness_mean', 0):.2f}, max {stats.get('staleness_max', 0)} versions"
        table.add_row("staleness", staleness)
        idle = record.idle_share()
        table.add_row("trainer busy", f"{bar(1 - idle)} {100 * (1 - idle):.0f} %")
    for name, value in _stage_rows(record):
        table.add_row(name, value)
    seconds = time.time() - record.started
    return Panel(Group(table), title="rollserve demo", subtitle=f"{seconds:.0f} s", expand=False)


def line(record: Record) -> str:
    """The view in one line."""
    parts = [f"[{time.time() - record.started:4.0f} s]", _phase(record)]
    if record.steps:
        last = record.steps[-1]
        stats = last["stats"] or {}
        parts.append(f"reward {last['reward']:.2f}")
        parts.append(f"staleness {stats.get('staleness_mean', 0):.1f}")
        parts.append(f"trainer busy {100 * (1 - record.idle_share()):.0f} %")
    if record.moments:
        now = record.moments[-1]
        parts.append(f"{record.tokens_per_s():.0f} tokens/s")
        stages = " ".join(f"{name} {now.stages.get(name, 0)}" for name in ("init", "ready", "run", "grade"))
        parts.append(stages)
    return " · ".join(parts)


class View:
    """Shows a ``Record`` while it changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, record: Record) -> None:
        if self._live:
            self._live.update(render(record), refresh=True)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._console.print(Text(line(record)), soft_wrap=True)
