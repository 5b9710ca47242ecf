"""The mixture of behaviours that the warm start imitates, as batches of tokens.

Each way an episode can go (a *path*) is rendered once, with stand-ins for keys and digits; the places
where two renderings with different stand-ins differ are its slots. A batch then is a draw of paths and
of values for their slots, without rendering a text again: every key and every digit is one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollserve.trainers.tiny.rendering import Rendering
from rollserve.trainers.tiny.task import (
    DIGITS,
    KEYS,
    easy_instruction,
    instruction,
    missing,
    pointer,
    read_command,
)

Ids = NDArray[np.int64]
Bits = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often each decision is taken: answer at once with a guess, or read a file that is not there
    (at the first file, and at the second); and after such an error, guess instead of going on. ``easy`` is
    the share of tasks of that kind, which are always shown solved."""

    guess_first: float = 0.18
    wrong_first: float = 0.10
    guess_second: float = 0.30
    wrong_second: float = 0.12
    guess_after_error: float = 0.5
    easy: float = 0.0


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one episode: two keys of the chain, two wrong keys, answer, guess."""

    keys: str
    digits: str

    @property
    def answer(self) -> str:
        return self.digits[:2]

    @property
    def guess(self) -> str:
        return self.digits[2:]


@dataclass(frozen=True, slots=True)
class Path:
    """``ids`` and ``mask`` (what the model samples) with stand-ins; ``slots[i]`` is the index of the
    value at ``places[i]``: 0–3 keys, 4–7 digits."""

    weight: float
    ids: Ids
    mask: Bits
    places: Ids
    slots: Ids


def paths(rendering: Rendering, mixture: Mixture) -> list[Path]:
    return [_path(rendering, weight, steps) for weight, steps in _ways(mixture) if weight > 0]


def _ways(m: Mixture) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Every way an episode can go, and its share. Steps: ``first``/``second`` read the right file,
    ``wrong first``/``wrong second`` one that is not there; ``guess`` and ``answer`` end. An easy task is
    answered at once."""
    for share, steps in _lookups(m):
        yield (1 - m.easy) * share, steps
    if m.easy:
        yield m.easy, ("answer",)


def _lookups(m: Mixture) -> Iterator[tuple[float, tuple[str, ...]]]:
    go_on = 1 - m.guess_after_error
    yield m.guess_first, ("guess",)
    yield m.wrong_first * m.guess_after_error, ("wrong first", "guess")
    right_first = 1 - m.guess_first - m.wrong_first
    right_second = 1 - m.guess_second - m.wrong_second
    for share, start in ((right_first, ("first",)), (m.wrong_first * go_on, ("wrong first", "first"))):
        yield share * m.guess_second, (*start, "guess")
        yield share * right_second, (*start, "second", "answer")
        yield share * m.wrong_second * m.guess_after_error, (*start, "wrong second", "guess")
        yield share * m.wrong_second * go_on, (*start, "wrong second", "second", "answer")


def _path(rendering: Rendering, weight: float, steps: tuple[str, ...]) -> Path:
    stand_ins = Values("abcd", "0123"), Values("efgh", "4567")
    (ids, mask), (other, _) = (_render(rendering, values, steps) for values in stand_ins)
    values = _value_ids(rendering, stand_ins[0])
    places = np.flatnonzero(ids != other)
    slots = np.array([values.index(int(ids[place])) for place in places], dtype=np.int64)
    return Path(weight, ids, mask, places, slots)


def _value_ids(rendering: Rendering, values: Values) -> list[int]:
    tokenizer = rendering.tokenizer
    keys = [tokenizer.encode(f" {key}") for key in values.keys]
    digits = [tokenizer.encode(digit) for digit in values.digits]
    return [token for (token,) in (*keys, *digits)]


def _render(rendering: Rendering, values: Values, steps: tuple[str, ...]) -> tuple[Ids, Bits]:
    first, second, wrong_first, wrong_second = list(values.keys)
    calls = {
        "first": (first, pointer(second)),
        "second": (second, values.answer),
        "wrong first": (wrong_first, missing(wrong_first)),
        "wrong second": (wrong_second, missing(wrong_second)),
    }
    easy = steps[0] == "answer"
    prompt = rendering.prompt(easy_instruction(values.answer) if easy else instruction(first))
    mask = [False] * len(prompt)
    for step in steps[:-1]:
        key, output = calls[step]
        sampled = rendering.call(read_command(key))
        extended = rendering.extend(prompt, sampled, output)
        mask += [True] * len(sampled)
        mask += [False] * (len(extended) - len(mask))
        prompt = extended
    sampled = rendering.final(values.guess if steps[-1] == "guess" else values.answer)
    ids = np.array(prompt + sampled, dtype=np.int64)
    return ids, np.array(mask + [True] * len(sampled), dtype=np.bool_)


class Demonstrations:
    """An endless stream of batches ``(ids, mask)``, ``[rows, length]``, padded on the right."""

    def __init__(self, rendering: Rendering, mixture: Mixture, seed: int) -> None:
        self._paths = paths(rendering, mixture)
        weights = np.array([path.weight for path in self._paths])
        self._shares = weights / weights.sum()
        self._rng = np.random.default_rng(seed)
        self._keys = np.array([rendering.tokenizer.encode(f" {key}")[0] for key in KEYS])
        self._digits = np.array([rendering.tokenizer.encode(digit)[0] for digit in DIGITS])

    def batch(self, rows: int) -> tuple[Ids, Bits]:
        drawn = self._rng.choice(len(self._paths), size=rows, p=self._shares)
        chosen = [self._paths[index] for index in drawn]
        length = max(len(path.ids) for path in chosen)
        ids = np.zeros((rows, length), dtype=np.int64)
        mask = np.zeros((rows, length), dtype=np.bool_)
        for row, path in enumerate(chosen):
            ids[row, : len(path.ids)] = path.ids
            ids[row, path.places] = self._draw()[path.slots]
            mask[row, : len(path.ids)] = path.mask
        return ids, mask

    def _draw(self) -> Ids:
        keys = self._rng.choice(self._keys, size=4, replace=False)
        return np.concatenate([keys, self._rng.choice(self._digits, size=4)])
