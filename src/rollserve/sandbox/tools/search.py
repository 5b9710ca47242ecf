"""``search``: what is where. ``rg`` if the image has it, else ``grep`` and ``find``; bounded, no binaries."""

from __future__ import annotations

import shlex
from typing import Any

from rollserve.errors import InvalidInput
from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.tools.base import ToolResult, function_schema, object_schema, shell_path, wrong
from rollserve.sandbox.tools.plain import Stateless

MAX_RESULTS = 200
MAX_LINE_CHARS = 300
OUTPUT_BYTES = 60_000
_FAILURES = ("grep: ", "rg: ", "find: ", "regex parse error", "/bin/sh:")

SCHEMA = function_schema(
    "search",
    "Search text files below a directory for a regular expression, or find files by name. Binary files and "
    f".git are left out; at most {MAX_RESULTS} results.",
    object_schema(
        (),
        pattern={
            "type": "string",
            "minLength": 1,
            "description": "A regular expression; each line it is found in is shown with path and number.",
        },
        path={"type": "string", "minLength": 1, "description": "Directory or file. Default: /workspace."},
        glob={
            "type": "string",
            "minLength": 1,
            "description": "Only files with such a name, as *.py. Without `pattern`: list them.",
        },
        ignore_case={"type": "boolean"},
        max_results={"type": "integer", "minimum": 1, "maximum": MAX_RESULTS},
    ),
)


class SearchTool(Stateless):
    schema = SCHEMA

    def __init__(self, sandbox: Sandbox, command_s: float) -> None:
        self._sandbox = sandbox
        self._command_s = command_s

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        pattern, glob = arguments.get("pattern"), arguments.get("glob")
        if pattern is None and glob is None:
            return wrong("give a `pattern`, a `glob`, or both")
        limit = arguments.get("max_results", MAX_RESULTS)
        find = _find(glob or "*") if pattern is None else _grep(pattern, glob, arguments.get("ignore_case"))
        try:
            script = (
                f"set -- {shell_path(arguments.get('path', '.'))}; "
                '[ -e "$1" ] || { echo "find: there is no $1"; exit 1; }; '
                f"{find} 2>&1 | head -n {limit + 1}"
            )
            result = await self._sandbox.exec(
                f"( {script} )", timeout_s=self._command_s, output_limit_bytes=OUTPUT_BYTES
            )
        except InvalidInput as error:
            return wrong(str(error))
        lines = result.output.splitlines()
        if lines and lines[0].startswith(_FAILURES):
            return wrong("\n".join(lines[:5]))
        text = "\n".join(_cut(line) for line in lines[:limit])
        if result.timed_out:
            return ToolResult(text=f"{text}\n[stopped after {self._command_s:g} s]".strip(), is_error=True)
        if not text:
            return ToolResult(text="[nothing found]")
        return ToolResult(text=f"{text}\n[more than {limit} results]" if len(lines) > limit else text)


def _find(glob: str) -> str:
    return f'find "$1" -name .git -prune -o -type f -name {shlex.quote(glob)} -print'


def _grep(pattern: str, glob: str | None, ignore_case: bool | None) -> str:
    """PCRE where grep has it: models write ``\\d`` and ``\\b``."""
    name, files = shlex.quote(pattern), shlex.quote(glob or "*")
    case = "i" if ignore_case else ""
    rg = f'rg -n{case} --no-heading --with-filename --hidden -g "!.git" -g {files} -e {name} -- "$1"'
    grep = f'grep -rHnIs{case}$kind --exclude-dir=.git --include={files} -e {name} -- "$1"'
    plain = f'find "$1" -name .git -prune -o -type f -name {files} -exec grep -Hns{case}E -e {name} {{}} +'
    return (
        f"{{ if command -v rg >/dev/null; then {rg}; "
        f"elif echo | grep -I --include=x -q '' 2>/dev/null; then kind=E; "
        f"echo | grep -qP '' 2>/dev/null && kind=P; {grep}; else {plain}; fi; }}"
    )


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]} [line cut]"
