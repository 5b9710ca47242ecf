"""Recipes: the part of a Dockerfile that can be built without a daemon or root. Pure: text in, steps out.

``FROM RUN COPY ENV ARG WORKDIR USER`` do what they do for Docker, in one stage. ``CMD ENTRYPOINT LABEL EXPOSE
STOPSIGNAL HEALTHCHECK MAINTAINER`` mean nothing to a sandbox and are passed over. Anything else is refused,
named with its line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from rollserve.errors import InvalidInput

_PASSED_OVER = frozenset({"CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER"})
_DIRECTIVE = re.compile(r"#\s*(escape|syntax)\s*=", re.IGNORECASE)
_VARIABLE = re.compile(
    r"\\(?P<escaped>\$)|\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?:(?P<sign>:[-+])(?P<word>[^{}]*))?\})"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_RECIPE_BYTES = 1 << 20


@dataclass(frozen=True)
class From:
    line: int
    image: str


@dataclass(frozen=True)
class Run:
    """``command`` is what a shell runs; ``arguments`` of the build are in its environment."""

    line: int
    command: str
    env: Mapping[str, str]
    arguments: Mapping[str, str]
    workdir: str
    user: str


@dataclass(frozen=True)
class Copy:
    line: int
    sources: tuple[str, ...]
    target: str
    workdir: str


@dataclass(frozen=True)
class Recipe:
    """``env``, ``workdir`` and ``user`` are what the recipe adds to, or replaces of, its base."""

    base: From
    steps: tuple[Run | Copy, ...]
    env: Mapping[str, str]
    workdir: str
    user: str


def parse_recipe(text: str, arguments: Mapping[str, str], *, base_env: Mapping[str, str] = {}) -> Recipe:
    """``arguments`` are values for the recipe's ``ARG``; ``base_env`` the variables of its base, for what
    refers to them. Raises ``InvalidInput`` that names the line."""
    reader = _Reader(dict(arguments), dict(base_env))
    for line, instruction in _instructions(text):
        word, _, rest = instruction.partition(" ")
        reader.take(line, word.upper(), rest.strip())
    if reader.base is None:
        raise InvalidInput("the recipe has no FROM", field="image")
    unknown = sorted(set(arguments) - reader.declared)
    if unknown:
        raise InvalidInput(f"the recipe has no ARG {unknown[0]}", field="image")
    return Recipe(reader.base, tuple(reader.steps), reader.env, reader.workdir, reader.user)


class _Reader:
    def __init__(self, given: dict[str, str], base_env: dict[str, str]) -> None:
        self._given = given
        self._base_env = base_env
        self._arguments: dict[str, str] = {}
        self._early: dict[str, str] = {}
        self.declared: set[str] = set()
        self.base: From | None = None
        self.steps: list[Run | Copy] = []
        self.env: dict[str, str] = {}
        self.workdir = ""
        self.user = ""

    def take(self, line: int, word: str, rest: str) -> None:
        if word in _PASSED_OVER:
            return
        handler = _HANDLERS.get(word)
        if handler is None:
            raise _refuse(line, f"{word} is not supported", "FROM, RUN, COPY, ENV, ARG, WORKDIR, USER are")
        if not rest:
            raise _refuse(line, f"{word} wants something after it")
        if self.base is None and word not in ("FROM", "ARG"):
            raise _refuse(line, f"{word} before FROM")
        if "<<" in rest and word in ("RUN", "COPY") and re.search(r"<<-?['\"]?\w", rest):
            raise _refuse(line, "a here-document is not supported")
        handler(self, line, rest)

    def from_(self, line: int, rest: str) -> None:
        if self.base is not None:
            raise _refuse(line, "a second FROM: builds of several stages are not supported")
        words = self._expand(line, rest).split()
        if words[0].startswith("--"):
            raise _refuse(line, f"FROM {words[0].partition('=')[0]} is not supported")
        if len(words) != 1 and not (len(words) == 3 and words[1].upper() == "AS"):
            raise _refuse(line, "FROM wants one image")
        self.base = From(line, words[0])
        self._early, self._arguments = self._arguments, {}

    def run(self, line: int, rest: str) -> None:
        self._no_flags(line, "RUN", rest)
        words = _json_words(rest)
        command = rest if words is None else shlex.join(words)
        values = dict(self.env), dict(self._arguments)
        self.steps.append(Run(line, command, *values, self.workdir, self.user))

    def copy(self, line: int, rest: str) -> None:
        self._no_flags(line, "COPY", rest)
        words = _json_words(rest) or _words(line, rest)
        words = [self._expand(line, word) for word in words]
        if len(words) < 2:
            raise _refuse(line, "COPY wants a source and a target")
        self.steps.append(Copy(line, tuple(words[:-1]), words[-1], self.workdir))

    def env_(self, line: int, rest: str) -> None:
        self.env |= self._pairs(line, "ENV", rest)

    def arg(self, line: int, rest: str) -> None:
        for word in _words(line, rest):
            name, equals, value = word.partition("=")
            self._check_name(line, name)
            self.declared.add(name)
            default = self._expand(line, value) if equals else self._early.get(name)
            chosen = self._given.get(name, default)
            if chosen is not None:
                self._arguments[name] = chosen

    def workdir_(self, line: int, rest: str) -> None:
        place = self._expand(line, _unquoted(line, rest))
        if not place.startswith("/"):
            place = f"{self.workdir.rstrip('/')}/{place}" if self.workdir else f"/{place}"
        self.workdir = place

    def user_(self, line: int, rest: str) -> None:
        self.user = self._expand(line, _unquoted(line, rest))

    def _pairs(self, line: int, word: str, rest: str) -> dict[str, str]:
        first = rest.split(None, 1)
        if "=" not in first[0]:  # ENV NAME the rest of the line
            if len(first) != 2:
                raise _refuse(line, f"{word} {first[0]} has no value")
            self._check_name(line, first[0])
            return {first[0]: self._expand(line, first[1])}
        found = {}
        for pair in _words(line, rest):
            name, equals, value = pair.partition("=")
            if not equals:
                raise _refuse(line, f"{word}: {pair!r} is not NAME=VALUE")
            self._check_name(line, name)
            found[name] = self._expand(line, value)
        return found

    def _expand(self, line: int, text: str) -> str:
        values = {**self._arguments, **self._base_env, **self.env}

        def value(match: re.Match[str]) -> str:
            if match["escaped"]:
                return "$"
            name = match["plain"] or match["name"]
            known = values.get(name, "")
            if match["sign"] == ":-":
                return known or match["word"]
            if match["sign"] == ":+":
                return match["word"] if known else ""
            return known

        return _VARIABLE.sub(value, text)

    def _check_name(self, line: int, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise _refuse(line, f"{name!r} is no name of a variable")

    def _no_flags(self, line: int, word: str, rest: str) -> None:
        if rest.startswith("--"):
            raise _refuse(line, f"{word} {rest.split()[0].partition('=')[0]} is not supported")


_HANDLERS = {
    "FROM": _Reader.from_,
    "RUN": _Reader.run,
    "COPY": _Reader.copy,
    "ENV": _Reader.env_,
    "ARG": _Reader.arg,
    "WORKDIR": _Reader.workdir_,
    "USER": _Reader.user_,
}


def _instructions(text: str) -> list[tuple[int, str]]:
    """Instructions with the number of their first line: continued lines joined as they are, comments and
    empty lines left out."""
    found: list[tuple[int, str]] = []
    parts: list[str] = []
    start = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("#"):
            if not found and not parts and (match := _DIRECTIVE.match(line)) and match[1].lower() == "escape":
                raise _refuse(number, "the directive escape is not supported")
            continue
        if not line:
            continue
        start = start or number
        text_here = raw.rstrip() if parts else line
        parts.append(text_here.removesuffix("\\"))
        if not line.endswith("\\"):
            found.append((start, "".join(parts)))
            parts, start = [], 0
    if parts:
        found.append((start, "".join(parts)))
    return [(number, re.sub(r"^(\S+)\s+", r"\1 ", line)) for number, line in found]


def _json_words(rest: str) -> list[str] | None:
    if not rest.startswith("["):
        return None
    try:
        words = json.loads(rest)
    except ValueError:
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _words(line: int, rest: str) -> list[str]:
    """As a shell splits them; ``\\$`` keeps its backslash, for the expansion to see."""
    try:
        return shlex.split(rest.replace("\\$", "\\\\$"))
    except ValueError as error:
        raise _refuse(line, f"quotes that don't close: {error}") from error


def _unquoted(line: int, rest: str) -> str:
    return " ".join(_words(line, rest))


def _refuse(line: int, message: str, hint: str | None = None) -> InvalidInput:
    return InvalidInput(f"line {line}: {message}", field="image", hint=hint)
