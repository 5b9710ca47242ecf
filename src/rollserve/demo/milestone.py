"""When was the policy good enough? Found afterwards, so that looking costs the training nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """The policy after a step. From the start of the training until then: ``busy_s`` the trainer made
    gradient steps and pushed weights, ``gradient_cpu_s`` the steps worked, ``cpu_s`` its whole process,
    ``seconds`` passed; ``rollouts`` had ended and had sampled ``tokens``, those that were left out or
    stopped too; ``trained`` groups had a gradient."""

    version: int
    step: int
    busy_s: float
    gradient_cpu_s: float
    cpu_s: float
    seconds: float
    rollouts: int
    tokens: int
    trained: int
    weights: Mapping[str, Any]

    def facts(self) -> dict[str, float]:
        return {
            "version": self.version,
            "step": self.step,
            "busy_s": round(self.busy_s, 2),
            "gradient_cpu_s": round(self.gradient_cpu_s, 2),
            "cpu_s": round(self.cpu_s, 2),
            "seconds": round(self.seconds, 2),
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "trained": self.trained,
        }


async def first_good(
    marks: Sequence[Milestone], rate: float, measure: Callable[[Milestone], Awaitable[float]]
) -> Milestone | None:
    """The first whose success rate is at least ``rate``, by bisection: as if a later one were never worse.
    None where the last one is not."""
    low, high = 0, len(marks)
    while low < high:
        middle = (low + high) // 2
        if await measure(marks[middle]) >= rate:
            high = middle
        else:
            low = middle + 1
    return marks[low] if low < len(marks) else None
