"""Files of tasks, or what a person thinks is one."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from rollserve.errors import InvalidInput, RollserveError, nearest
from rollserve.records.task import Task

_OF_A_GROUP = re.compile(r"groups\.(\d+)\.(?:task\.)?(.+)")
"""A field of what is submitted, as the server names it."""

LOOKED_AT = 1000
"""Names in a folder, for the nearest to one that is not there."""


def read_text(path: Path) -> str:
    """The file's text, or standard input for ``-``. Raises ``InvalidInput``."""
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"can't read {path}: it is no text ({error.reason})") from error
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror or error}", hint=_near(path)) from error


def _near(path: Path) -> str:
    """The file of its folder with the nearest name, or what else could be given."""
    try:
        names = [each.name for each in islice(path.parent.iterdir(), LOOKED_AT) if each.is_file()]
    except OSError:
        return f"there is no folder {path.parent}; paths are relative to {Path.cwd()}"
    if near := nearest(path.name, names, cutoff=0.6):
        return near
    return f"a path, relative to {Path.cwd()}, or `-` for standard input"


def parse_task(text: str, where: str) -> Task:
    """Raises ``InvalidInput`` that names the place and the field."""
    try:
        return Task.model_validate_json(text)
    except ValidationError as error:
        from rollserve.api.problems import invalid  # slow to import

        found = invalid(error, Task)
        field = f"{where}: {found.field}" if found.field else where
        raise InvalidInput(found.message, field=field, hint=found.hint) from error


def _one_a_line(text: str) -> list[str]:
    """The lines; a file that is one JSON object over several lines is one task."""
    try:
        return [text] if isinstance(json.loads(text), dict) else text.splitlines()
    except ValueError:  # several: "extra data" after the first
        return text.splitlines()


@dataclass(frozen=True, slots=True)
class TaskFile:
    """``places`` says of each task where it stands: ``tasks.jsonl line 3``."""

    tasks: list[Task]
    places: list[str]

    def place(self, error: RollserveError) -> None:
        """What the server refused, by its place in the file instead of in the request."""
        found = _OF_A_GROUP.fullmatch(error.field or "")
        if found and int(found[1]) < len(self.places):
            error.field = f"{self.places[int(found[1])]}: {found[2]}"


def _lines(path: Path) -> list[tuple[str, str]]:
    """Where it stands, and the text, of each line that has one. Raises ``InvalidInput`` when none has."""
    name = "standard input" if str(path) == "-" else path.name
    numbered = enumerate(_one_a_line(read_text(path)), start=1)
    lines = [(f"{name} line {number}", line) for number, line in numbered if line.strip()]
    if not lines:
        raise InvalidInput(f"{path} holds no task", hint="one JSON object a line")
    return lines


def read_tasks(path: Path) -> TaskFile:
    """Raises ``InvalidInput`` that names the line and the field."""
    lines = _lines(path)
    return TaskFile([parse_task(line, place) for place, line in lines], [place for place, _ in lines])


def read_task(path: Path, line: int | None) -> Task:
    """The file's one task, or that of its ``line`` (from 1, empty ones counted). Raises ``InvalidInput``."""
    lines = _lines(path)
    if line is None:
        if len(lines) > 1 and _is_json(lines[0][1]):
            what = f"{path} has {len(lines)} lines, and this takes one task"
            raise InvalidInput(what, hint="--line N says which, from 1")
        text = lines[0][1] if len(lines) == 1 else "\n".join(text for _, text in lines)
        return parse_task(text, str(path))
    for place, text in lines:
        if place.endswith(f" line {line}"):
            return parse_task(text, place)
    raise InvalidInput(f"{path} has no task at line {line}", field="--line")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
