"""How fast backends answer, smoothed, and which of them are far slower than the others. Pure.

Each is compared with the median of its peers, by its time to the first token and by its time for each token
after it: what the one that hangs does to the others, or the load that all carry, moves the median with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

T = TypeVar("T")

ENOUGH = 20
"""Calls, before what a backend does is judged."""

PEERS = 2
"""At least, to say who is the odd one."""

_NEWEST = 0.1
"""Share of a sample in what is smoothed."""

_FLOORS_S = {"first token": 0.25, "token": 0.005}
"""Nobody is slow for less than this much more."""


class Sample(NamedTuple):
    """Of one call, in seconds; None where it can't be told."""

    first_s: float | None
    token_s: float | None


@dataclass(slots=True)
class Latency:
    calls: int = 0
    first_s: float | None = None
    token_s: float | None = None

    def add(self, sample: Sample) -> None:
        self.calls += 1
        self.first_s = _smoothed(self.first_s, sample.first_s)
        self.token_s = _smoothed(self.token_s, sample.token_s)


def _smoothed(before: float | None, value: float | None) -> float | None:
    if before is None or value is None:
        return before if value is None else value
    return before + _NEWEST * (value - before)


def sample(started_at: float, first_at: float | None, ended_at: float, tokens: int) -> Sample:
    """Of a call that is not streamed (``first_at`` None), all of its time is spread over its tokens."""
    if first_at is None:
        return Sample(None, (ended_at - started_at) / tokens if tokens else None)
    each_s = (ended_at - first_at) / (tokens - 1) if tokens > 1 else None
    return Sample(first_at - started_at, each_s)


def slow(found: Sample | Latency, peers: Iterable[Latency], ratio: float) -> str | None:
    """Why it is too slow beside these; None when it is not, or there are too few to say."""
    known = [peer for peer in peers if peer.calls >= ENOUGH]
    for what, value, others in (
        ("first token", found.first_s, [peer.first_s for peer in known]),
        ("token", found.token_s, [peer.token_s for peer in known]),
    ):
        times = [each for each in others if each is not None]
        if value is None or len(times) < PEERS:
            continue
        usual = median(times)
        if value > ratio * usual and value - usual > _FLOORS_S[what]:
            return f"{value:.3g} s for a {what}, where the others take {usual:.3g} s"
    return None


def outliers(found: Mapping[T, Latency], ratio: float) -> list[tuple[T, str]]:
    """With why; the slowest first."""
    out: list[tuple[float, T, str]] = []
    for name, own in found.items():
        peers = [other for each, other in found.items() if each != name]
        if own.calls >= ENOUGH and (why := slow(own, peers, ratio)) is not None:
            out.append(((own.first_s or 0.0) + (own.token_s or 0.0), name, why))
    return [(name, why) for _, name, why in sorted(out, key=lambda each: -each[0])]
