"""Figures, and how fast the machine was as they were taken."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

CALIBRATED_MS = 40.0


def calibrate() -> float:
    """CPU milliseconds of a fixed loop of arithmetic and JSON."""
    pairs = [{"x": number, "y": number / 7} for number in range(100)]
    document = json.dumps(
        {"ids": list(range(400)), "texts": [f"tok{number}" for number in range(400)], "pairs": pairs}
    )
    begun, total = time.process_time(), 0
    for number in range(300_000):
        total += number & 7
    for _ in range(60):
        json.dumps(json.loads(document))
    return (time.process_time() - begun) * 1e3


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def report(what: str, found: dict[str, Any]) -> None:
    gateway, calib_ms = found.get("gateway"), calibrate()
    if isinstance(gateway, dict):
        others = {name: each["cpu_ms"] for name, each in found.items() if isinstance(each, dict)}
        found["ratio"] = {
            name: round(gateway["cpu_ms"] / cpu_ms, 2) for name, cpu_ms in others.items() if name != "gateway"
        }
        found["norm"] = round(gateway["cpu_ms"] * CALIBRATED_MS / calib_ms, 2)
    print(json.dumps({"what": what, "calib_ms": round(calib_ms, 1), **found}), flush=True)
