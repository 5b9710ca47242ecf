"""What an engine says of itself at ``GET /metrics`` (Prometheus text), by the names that are asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


class Metrics:
    """``names`` without the engine's ``prefix``. A name that comes with several labels (one series an
    engine, say) is summed, or the greatest where it is one of ``greatest``."""

    def __init__(self, prefix: str, names: Sequence[str], greatest: Sequence[str] = ()) -> None:
        wanted = "|".join(map(re.escape, (*names, *greatest)))
        series = rf"^{re.escape(prefix)}({wanted})(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$"
        self._series = re.compile(series.encode(), re.MULTILINE)
        self._greatest = frozenset(greatest)

    def read(self, body: bytes) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for raw, value in self._series.findall(body):
            name = raw.decode()
            known = found.get(name)
            if known is None:
                found[name] = float(value)
            else:
                found[name] = max(known, float(value)) if name in self._greatest else known + float(value)
        return found


def whole(value: float | None) -> int | None:
    return None if value is None else int(value)
