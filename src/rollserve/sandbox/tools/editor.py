"""``str_replace_editor``: look at text files and change them, through the sandbox's file operations.

Nothing but a POSIX shell is asked of the image. A file is text when it has no NUL byte; bytes that are
no UTF-8 survive an edit unchanged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from rollserve.errors import InvalidInput, SandboxError, TooLarge
from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.tools.base import (
    ToolResult,
    function_schema,
    object_schema,
    shell_path,
    still_there,
    wrong,
)
from rollserve.sandbox.tools.plain import Stateless

MAX_FILE_BYTES = 8 << 20
MAX_VIEW_CHARS = 60_000
MAX_LINE_CHARS = 2_000
MAX_ENTRIES = 300
MAX_UNDO = 20
MAX_UNDO_BYTES = 32 << 20
CONTEXT_LINES = 4
FILE_S = 30.0

_DESCRIPTION = """View, create and edit text files.
`view` shows a file with line numbers (`view_range` for a part), or what is in a directory, two levels deep. \
`create` writes `file_text`. `str_replace` replaces `old_str`, which must occur exactly once and match \
exactly, white space included. `insert` puts `new_str` after line `insert_line` (0: at the top). \
`undo_edit` takes the last edit of the file back."""

SCHEMA = function_schema(
    "str_replace_editor",
    _DESCRIPTION,
    object_schema(
        ("command", "path"),
        command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
        path={"type": "string", "minLength": 1, "description": "Absolute, or relative to /workspace."},
        file_text={"type": "string", "description": "For `create`."},
        old_str={"type": "string", "minLength": 1, "description": "For `str_replace`."},
        new_str={"type": "string", "description": "For `str_replace` (empty by default) and `insert`."},
        insert_line={"type": "integer", "minimum": 0, "description": "For `insert`."},
        view_range={
            "type": "array",
            "items": {"type": "integer"},
            "minItems": 2,
            "maxItems": 2,
            "description": "For `view`: first and last line, counted from 1; -1 as last is the end.",
        },
    ),
)
_NEEDS = {"create": ("file_text",), "str_replace": ("old_str",), "insert": ("insert_line", "new_str")}


class Mistake(Exception):
    """What the model is told."""


@dataclass(frozen=True)
class _Before:
    """A file as it was; ``data`` is None where there was none."""

    path: str
    data: bytes | None


class EditorTool(Stateless):
    schema = SCHEMA

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._undo: deque[_Before] = deque()

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        command, path = arguments["command"], arguments["path"]
        for name in _NEEDS.get(command, ()):
            if name not in arguments:
                return wrong(f"`{command}` needs `{name}`")
        try:
            return ToolResult(text=await self._act(command, path, arguments))
        except (Mistake, InvalidInput) as mistake:
            return wrong(str(mistake))

    async def _act(self, command: str, path: str, arguments: dict[str, Any]) -> str:
        match command:
            case "view":
                return await self._view(path, arguments.get("view_range"))
            case "create":
                return await self._create(path, arguments["file_text"])
            case "str_replace":
                return await self._replace(path, arguments["old_str"], arguments.get("new_str", ""))
            case "insert":
                return await self._insert(path, arguments["insert_line"], arguments["new_str"])
            case _:
                return await self._take_back(path)

    # -- looking ------------------------------------------------------------------------------

    async def _view(self, path: str, view_range: list[int] | None) -> str:
        try:
            data = await self._sandbox.read_file(path, limit_bytes=MAX_FILE_BYTES)
        except TooLarge:
            return await self._view_part(path, view_range)
        except SandboxError as error:
            if await self._kind(path) == "folder":
                return await self._list(path)
            raise Mistake(error.message) from None
        lines = _lines(_decoded(path, data))
        first, last = _bounds(view_range, len(lines), path)
        return _numbered(lines[first - 1 : last], first, path)

    async def _view_part(self, path: str, view_range: list[int] | None) -> str:
        """Of a file too big to be read as a whole."""
        if view_range is None or view_range[1] < view_range[0] or view_range[0] < 1:
            raise Mistake(
                f"{path} has more than {MAX_FILE_BYTES} bytes: give a `view_range`, or use `search`"
            )
        first, last = view_range
        script = f"sed -n '{first},{last}p;{last}q' < {shell_path(path)}"
        result = await self._sandbox.exec(
            f"( {script} )", timeout_s=FILE_S, output_limit_bytes=MAX_VIEW_CHARS
        )
        return _numbered(_lines(result.output), first, path)

    async def _list(self, path: str) -> str:
        script = (
            f"cd {shell_path(path)} && find . -mindepth 1 -maxdepth 2 ! -path '*/.*' 2>/dev/null"
            f" | sort | head -n {MAX_ENTRIES + 1}"
        )
        result = await self._sandbox.exec(f"( {script} )", timeout_s=FILE_S)
        names = [name.removeprefix("./") for name in result.output.splitlines()]
        more = f"\n[more than {MAX_ENTRIES} entries]" if len(names) > MAX_ENTRIES else ""
        return f"{path} (hidden entries left out):\n" + "\n".join(names[:MAX_ENTRIES]) + more

    async def _kind(self, path: str) -> str:
        """Builtins alone: no process is started. Raises ``SandboxError`` when the sandbox is gone."""
        name = shell_path(path)
        script = f"if [ -d {name} ]; then echo folder; elif [ -e {name} ]; then echo file; fi"
        kind = (await self._sandbox.exec(script, timeout_s=FILE_S)).output.strip()
        if not kind:
            raise Mistake(f"there is no {path}")
        return kind

    # -- changing -----------------------------------------------------------------------------

    async def _create(self, path: str, text: str) -> str:
        before = await self._read_if_there(path)
        await self._write(path, text, before)
        return f"{path} was {'created' if before is None else 'overwritten'}"

    async def _replace(self, path: str, old: str, new: str) -> str:
        text = await self._text(path)
        places = _places(text, old)
        if len(places) != 1:
            raise Mistake(_not_once(path, text, old, places))
        start = places[0]
        changed = text[:start] + new + text[start + len(old) :]
        await self._write(path, changed, _bytes(text))
        return _changed(path, changed, start, len(new))

    async def _insert(self, path: str, line: int, new: str) -> str:
        text = await self._text(path)
        lines = _kept_lines(text)
        if line > len(lines):
            raise Mistake(f"`insert_line` is {line}, and {path} has {len(lines)} lines")
        before = "".join(lines[:line])
        if before and not before.endswith("\n"):
            before += "\n"
        new = new if new.endswith("\n") else new + "\n"
        changed = before + new + "".join(lines[line:])
        await self._write(path, changed, _bytes(text))
        return _changed(path, changed, len(before), len(new))

    async def _take_back(self, path: str) -> str:
        found = next((before for before in reversed(self._undo) if before.path == path), None)
        if found is None:
            raise Mistake(f"there is no edit of {path} to take back")
        self._undo.remove(found)
        if found.data is None:
            await self._sandbox.exec(f"rm -f -- {shell_path(path)}", timeout_s=FILE_S)
            return f"{path} was removed: it had been created"
        await self._put(path, found.data)
        return f"the last edit of {path} was taken back"

    # -- files --------------------------------------------------------------------------------

    async def _text(self, path: str) -> str:
        return _decoded(path, await self._read(path))

    async def _read(self, path: str) -> bytes:
        try:
            return await self._sandbox.read_file(path, limit_bytes=MAX_FILE_BYTES)
        except TooLarge:
            raise Mistake(f"{path} has more than {MAX_FILE_BYTES} bytes: too many to edit here") from None
        except SandboxError as error:
            await still_there(self._sandbox)
            raise Mistake(error.message) from None

    async def _read_if_there(self, path: str) -> bytes | None:
        try:
            kind = await self._kind(path)
        except Mistake:
            return None
        if kind == "folder":
            raise Mistake(f"{path} is a directory")
        return await self._read(path)

    async def _write(self, path: str, text: str, before: bytes | None) -> None:
        await self._put(path, _bytes(text))
        self._undo.append(_Before(path, before))
        while len(self._undo) > MAX_UNDO or sum(len(b.data or b"") for b in self._undo) > MAX_UNDO_BYTES:
            self._undo.popleft()

    async def _put(self, path: str, data: bytes) -> None:
        try:
            await self._sandbox.write_file(path, data)
        except SandboxError as error:
            await still_there(self._sandbox)
            raise Mistake(error.message) from None


def _decoded(path: str, data: bytes) -> str:
    if b"\0" in data:
        raise Mistake(f"{path} is a binary file of {len(data)} bytes")
    return data.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _kept_lines(text: str) -> list[str]:
    """With their ends, which are newlines and nothing else."""
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _bounds(view_range: list[int] | None, count: int, path: str) -> tuple[int, int]:
    if view_range is None:
        return 1, count
    first, last = view_range
    if first < 1 or (first > count and count > 0) or (last != -1 and last < first):
        raise Mistake(f"`view_range` {view_range} does not fit: {path} has lines 1 to {count}")
    return first, count if last == -1 else min(last, count)


def _numbered(lines: list[str], first: int, path: str) -> str:
    if not lines:
        return f"{path} is empty there"
    shown: list[str] = []
    room = MAX_VIEW_CHARS
    for number, line in enumerate(lines, first):
        text = line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]} [line cut]"
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        room -= len(text) + 8
        if room < 0:
            last = first + len(lines) - 1
            shown.append(f"[lines {number} to {last} left out: give a `view_range`]")
            break
        shown.append(f"{number:6}\t{text}")
    return "\n".join(shown)


def _places(text: str, old: str) -> list[int]:
    """Where it begins, overlapping ones included."""
    places: list[int] = []
    at = text.find(old)
    while at >= 0 and len(places) < 100:
        places.append(at)
        at = text.find(old, at + 1)
    return places


def _not_once(path: str, text: str, old: str, places: list[int]) -> str:
    if places:
        lines = ", ".join(str(text.count("\n", 0, at) + 1) for at in places[:20])
        return (
            f"`old_str` occurs {len(places)} times in {path}, at lines {lines}: it must occur once; "
            "add lines around it"
        )
    hint = ""
    if (line := _same_but_for_space(text, old)) is not None:
        hint = f"; from line {line} on it is there with other white space"
    elif "\r\n" in text and "\n" in old:
        hint = "; its lines end in CRLF"
    return f"`old_str` does not occur in {path}{hint}"


def _same_but_for_space(text: str, old: str) -> int | None:
    wanted = [line.split() for line in old.strip().split("\n")]
    lines = [line.split() for line in text.split("\n")]
    for start in range(len(lines) - len(wanted) + 1):
        if lines[start : start + len(wanted)] == wanted:
            return start + 1
    return None


def _changed(path: str, text: str, start: int, length: int) -> str:
    """The lines around a change."""
    first = text.count("\n", 0, start) + 1
    last = text.count("\n", 0, start + length) + 1
    lines = _lines(text)
    begin = max(1, first - CONTEXT_LINES)
    end = min(len(lines), last + CONTEXT_LINES)
    return f"{path} was edited:\n{_numbered(lines[begin - 1 : end], begin, path)}"
