"""From the lines of a sheet to the sums."""

from collections.abc import Iterable

from tally.durations import minutes, written


class BadLine(Exception):
    """Names the line, counted from 1."""


def report(lines: Iterable[str]) -> str:
    """A line is ``PROJECT DURATION``. Blank ones, and those that begin with ``#``, are passed over."""
    totals: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            project, duration = words
            totals[project] = totals.get(project, 0) + minutes(duration)
        except ValueError:
            raise BadLine(f"line {number}: not PROJECT DURATION: {line.strip()}") from None
    rows = [*sorted(totals.items()), ("total", sum(totals.values()))]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:{width}} {written(total):>6}\n" for name, total in rows)
