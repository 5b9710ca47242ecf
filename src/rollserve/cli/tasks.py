"""Files of tasks, or what a person thinks is one."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from rollserve.errors import InvalidInput, nearest
from rollserve.records.task import Task

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


def read_tasks(path: Path) -> list[Task]:
    text = read_text(path)
    tasks = [
        parse_task(line, f"line {number}")
        for number, line in enumerate(_one_a_line(text), start=1)
        if line.strip()
    ]
    if not tasks:
        raise InvalidInput(f"{path} holds no task", hint="one JSON object a line")
    return tasks
