"""Tasks in a JSONL file on the server: read line by line, never as a whole."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

from rollserve.errors import InvalidInput

MAX_LINE_BYTES = 16 << 20
FIELD = "source.path"


def open_task_file(folder: Path | None, name: str) -> TaskFile:
    """Raises ``InvalidInput`` for a file that is not in ``folder``, or can't be read. Blocks: the file is
    read once."""
    if folder is None:
        raise InvalidInput(
            "this server reads no task files", field=FIELD, hint="source_dir names their folder"
        )
    root = folder.absolute().resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise InvalidInput(f"{name!r} is outside the folder of task files", field=FIELD)
    try:
        return TaskFile(path)
    except OSError as error:
        raise InvalidInput(f"{name!r} can't be read: {error.strerror}", field=FIELD) from error


class TaskFile:
    """``rollserve.store.task_lines.TaskLines``. Empty lines are no tasks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")
        self._numbers = array("Q")
        digest = hashlib.sha256()
        place = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if line.strip():
                    self._starts.append(place)
                    self._numbers.append(number)
                place += len(line)
        self.lines = len(self._starts)
        self.digest = digest.hexdigest()

    def read(self, index: int) -> tuple[str, bytes]:
        where = f"line {self._numbers[index]}"
        try:
            with self._path.open("rb") as file:
                file.seek(self._starts[index])
                line = file.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise InvalidInput(f"{where}: the file can't be read: {error.strerror}", field=FIELD) from error
        if len(line) > MAX_LINE_BYTES:
            raise InvalidInput(f"{where} has more than {MAX_LINE_BYTES} bytes", field=FIELD)
        return where, line
