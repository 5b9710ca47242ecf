"""Does every backend serve the weights it claims? A short fixed sequence of tokens, scored by each.

A backend is judged by its distance from what is expected (the trainer's own figures, else what the others
say), and by its own past: where the expected figures have moved since the last version and those of a
backend have not, it still serves the old weights, however small the step was. One backend and no figures
prove nothing, and the verdict says so. ``judge`` is pure.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollserve.backend.base import Backend as Client
from rollserve.errors import RollserveError
from rollserve.records.policy import Backend, BackendSpec
from rollserve.records.update import BackendFinding, Canary

TOKENS = 32
WITHIN_S = 30.0

MOVED = 1e-3
"""Nats a token: below it, figures have not moved."""

UNMOVED = 0.25
"""Of the movement that is expected: with less, a backend has not followed."""

Scores = Mapping[str, list[float] | str]
"""By backend id: logprobs, or why there are none."""

Verdict = Literal["verified", "unverified", "failed"]
Open = Callable[[BackendSpec, str], Client]


def canary_ids(context_tokens: int | None) -> list[int]:
    """Small ids, so that any vocabulary has them."""
    count = min(TOKENS, (context_tokens or TOKENS + 1) - 1)
    return [3 + (37 * at * at + 11 * at + 5) % 197 for at in range(count)]


async def score_all(backends: Sequence[Backend], model: str, ids: list[int], open_backend: Open) -> Scores:
    """All at once; each within ``WITHIN_S``."""
    found = await asyncio.gather(*(_score(backend, model, ids, open_backend) for backend in backends))
    return {backend.id: scores for backend, scores in zip(backends, found, strict=True)}


async def _score(backend: Backend, model: str, ids: list[int], open_backend: Open) -> list[float] | str:
    client = open_backend(backend.spec, model)
    try:
        async with asyncio.timeout(WITHIN_S):
            return await client.score(ids, model=model)
    except TimeoutError:
        return f"no score within {WITHIN_S:g} s"
    except RollserveError as error:
        return str(error)
    finally:
        await client.close()


_WRONG = {"differs": "its logprobs are those of other weights", "unmoved": "it still serves the old weights"}


@dataclass(kw_only=True)
class _Judging:
    """``scores`` are those of backends that gave any."""

    scores: dict[str, list[float]]
    figures: Sequence[float] | None
    previous: Canary | None
    tolerance: float
    found: dict[str, BackendFinding] = field(default_factory=dict)

    def unmoved(self) -> set[str]:
        """Those that have not followed where others, or the trainer's figures, have moved."""
        before = self.previous.scores if self.previous is not None else {}
        moves = {
            name: distance(scores, before[name])
            for name, scores in self.scores.items()
            if len(before.get(name, ())) == len(scores)
        }
        told = self.previous.expected if self.previous is not None else None
        if self.figures is None:
            expected = max(moves.values(), default=0.0)
        else:
            expected = distance(self.figures, told) if told and len(told) == len(self.figures) else 0.0
        if expected <= MOVED:
            return set()
        return {name for name, move in moves.items() if move < UNMOVED * expected}

    def expected(self, names: Sequence[str]) -> list[float]:
        if self.figures is not None:
            return list(self.figures)
        return [statistics.median(column) for column in zip(*(self.scores[n] for n in names), strict=True)]

    def compare(self) -> bool:
        """Fill ``found``; False where two halves disagree and nothing tells which is right."""
        stuck = self.unmoved()
        rest = [name for name in self.scores if name not in stuck]
        expected = self.expected(rest or list(self.scores)) if self.scores else []
        for name, scores in self.scores.items():
            far = distance(scores, expected)
            self.found[name] = BackendFinding(verdict=self._of(far, name in stuck), difference=far)
        agree = sum(self.found[name].verdict == "agrees" for name in rest)
        return self.figures is not None or len(rest) < 2 or 2 * agree > len(rest)

    def _of(self, far: float, stuck: bool) -> Literal["unmoved", "differs", "agrees"]:
        if stuck:
            return "unmoved"
        return "differs" if far > self.tolerance else "agrees"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """``undecided``: backends disagree, and nothing tells which are right."""

    canary: Canary
    undecided: bool = False

    @property
    def wrong(self) -> dict[str, str]:
        """Backends that do not serve what they claim, and what they do."""
        return {
            name: f"canary at version {self.canary.version}: {_WRONG[finding.verdict]}"
            for name, finding in self.canary.backends.items()
            if finding.verdict in _WRONG
        }

    @property
    def right(self) -> set[str]:
        """Backends that are proved to serve what they claim."""
        if self.canary.verdict == "unverified":
            return set()
        return {name for name, finding in self.canary.backends.items() if finding.verdict == "agrees"}


def judge(
    version: int,
    scores: Scores,
    *,
    figures: Sequence[float] | None = None,
    previous: Canary | None = None,
    tolerance: float,
    at: float = 0.0,
) -> Judgement:
    """``previous`` is what was found under the weights before (those of another version)."""
    given = {name: found for name, found in scores.items() if not isinstance(found, str)}
    judging = _Judging(scores=given, figures=figures, previous=previous, tolerance=tolerance)
    decided = judging.compare()
    for name, found in scores.items():
        if isinstance(found, str):
            judging.found[name] = BackendFinding(verdict="unscored", detail=found)
    canary = Canary(
        version=version,
        verdict="unverified",
        at=at,
        backends=judging.found,
        expected=None if figures is None else list(figures),
        scores=given,
    )
    verdict, detail = _verdict(judging, decided)
    return Judgement(
        canary=canary.model_copy(update={"verdict": verdict, "detail": detail}), undecided=not decided
    )


def judge_restored(previous: Canary, scores: Scores, *, tolerance: float, at: float = 0.0) -> Judgement:
    """After an update that did not happen: does each still score as it did at that version? Against its own
    past a backend is held to a fifth of the tolerance."""
    found: dict[str, BackendFinding] = {}
    for name, now in scores.items():
        before = previous.scores.get(name)
        if isinstance(now, str):
            found[name] = BackendFinding(verdict="unscored", detail=now)
        elif before is not None and len(before) == len(now):
            far = distance(now, before)
            verdict: Literal["differs", "agrees"] = "differs" if far > tolerance / 5 else "agrees"
            found[name] = BackendFinding(verdict=verdict, difference=far)
        else:
            found[name] = BackendFinding(verdict="unscored", detail="no score of before to compare with")
    wrong = sorted(name for name, one in found.items() if one.verdict == "differs")
    known = any(one.verdict == "agrees" for one in found.values())
    canary = Canary(
        version=previous.version,
        verdict="failed" if wrong else "verified" if known else "unverified",
        detail=f"not the weights of before the update: {', '.join(wrong)}" if wrong else "",
        at=at,
        backends=found,
        expected=previous.expected,
        scores=previous.scores,
    )
    return Judgement(canary=canary)


def _verdict(judging: _Judging, decided: bool) -> tuple[Verdict, str]:
    if not decided:
        return (
            "failed",
            "the backends disagree; nothing tells which: send the trainer's figures",
        )
    wrong = [name for name, one in judging.found.items() if one.verdict in _WRONG]
    if wrong:
        return "failed", f"not the weights they claim: {', '.join(sorted(wrong))}"
    if not judging.scores:
        return "unverified", "no backend gives logprobs of a prompt"
    if judging.figures is not None:
        return "verified", "as the trainer's figures"
    if len(judging.scores) > 1:
        return "verified", "the backends agree with each other"
    return "unverified", f"one backend, and no figures from the trainer{_still(judging)}"


def _still(judging: _Judging) -> str:
    before = judging.previous.scores if judging.previous is not None else {}
    same = all(before.get(name) == scores for name, scores in judging.scores.items())
    return "; its logprobs did not change at all" if same else ""


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean over tokens."""
    if not one:
        return 0.0
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
