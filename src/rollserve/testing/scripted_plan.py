"""A scripted policy that follows a plan with whatever tools it is offered: for real harnesses.

The plan says what to do (write a file, change it, run a command, say the end), and each harness has its
own tools for that. The prompt is read back as text: the tools offered stand in it, in the form of Qwen3's
template, and the tool results in it say how far the plan has come. So the same plan plays through any
harness and dialect, and every token of it is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollserve.testing.scripted import Reply, Script
from rollserve.tiny_tokenizer import TinyTokenizer

WATCHWORD = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""mini-swe-agent ends when a command prints it, and on nothing else."""

RESULT = "<tool_response>"

SUMMARY = (
    "<state_snapshot>\n<summary>\nThe notes were asked for with alpha and beta, then gamma for beta, and a"
    " look at them; some of it is done.\n</summary>\n</state_snapshot>"
)
"""In the frame that each harness looks for."""

_SUMMARISE = ("Respond with TEXT ONLY", "CONTEXT CHECKPOINT COMPACTION", "<state_snapshot>")

_TOOLS_BEGIN = "function signatures within <tools></tools> XML tags:\n<tools>\n"

_RUN = (
    *("bash", "Bash", "shell", "shell_command", "exec_command", "run_shell_command", "terminal"),
    *("execute_bash", "run_commands"),
)
_TOOLS: Mapping[str, tuple[str, ...]] = {
    "run": _RUN,
    "write": ("write", "Write", "write_file", "create_file"),
    "edit": ("edit", "Edit", "replace"),
}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "path": ("path", "file_path", "filePath", "absolute_path", "filename"),
    "content": ("content", "contents", "file_text", "text"),
    "old": ("oldText", "old_string", "oldString", "old_str", "old"),
    "new": ("newText", "new_string", "newString", "new_str", "new"),
    "command": ("command", "cmd", "commands"),
}
_FILLER: Mapping[str, Any] = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}


@dataclass(frozen=True, kw_only=True)
class Step:
    """``do`` it with a tool of that kind if there is one, else with ``command`` in a shell. ``say`` stands
    before the call; a step that does nothing ends the plan."""

    say: str = ""
    do: Literal["write", "edit", "run"] | None = None
    command: str = ""
    given: Mapping[str, str] | None = None


def editing_plan(path: str = "/workspace/notes.txt") -> list[Step]:
    """Write a file, change a line of it, look at it, and say what is in it."""
    return [
        Step(
            say="I write the file first.",
            do="write",
            command=f"printf 'alpha\\nbeta\\n' > {path}",
            given={"path": path, "content": "alpha\nbeta\n"},
        ),
        Step(
            say="Now the second line.",
            do="edit",
            command=f"sed -i s/beta/gamma/ {path}",
            given={"path": path, "old": "beta", "new": "gamma"},
        ),
        Step(say="Let me look at it.", do="run", command=f"cat {path}; wc -l < {path}"),
        Step(say="The file has two lines, alpha and gamma."),
    ]


def long_plan(path: str = "/workspace/notes.txt") -> list[Step]:
    """The same, with much to read on the way: a small context must be compacted."""
    write, edit, look, end = editing_plan(path)
    read = Step(say="I read what there is.", do="run", command="seq 1000 4000")
    return [write, read, read, edit, read, look, end]


def follow_through(steps: Sequence[Step]) -> Script:
    """``follow`` for agents that forget: every prompt that was not met before, and is no side call, is at
    the next step. What asks for a summary gets ``SUMMARY``."""
    tokenizer = TinyTokenizer()
    said: dict[tuple[int, ...], Reply] = {}
    left = list(steps)

    def script(prompt_ids: list[int]) -> Reply:
        key = tuple(prompt_ids)
        if key not in said:
            said[key] = _reply(tokenizer, _next(tokenizer.decode(prompt_ids), left))
        return said[key]

    return script


def _next(prompt: str, left: list[Step]) -> str:
    tools = offered(prompt)
    newest = prompt.rpartition("<|im_start|>user")[2].replace(SUMMARY, "")
    if any(words in newest for words in _SUMMARISE):
        return SUMMARY
    if not tools:
        return SUMMARY if "summar" in prompt and "a title" not in prompt else "Edit a file"
    step = left.pop(0) if len(left) > 1 else left[0]
    if step.do is None and WATCHWORD in prompt:
        step = Step(say=step.say, do="run", command=f"echo {WATCHWORD}")
    return _spoken(step, tools)


def follow(steps: Sequence[Step], *, title: str = "Edit a file") -> Script:
    """The script that does the step a prompt is at. A prompt without tools is a side call: it gets the
    ``title``. Raises ``ValueError`` where no tool offered can do a step."""
    tokenizer = TinyTokenizer()
    result_id = tokenizer.token_id(RESULT)

    def script(prompt_ids: list[int]) -> Reply:
        text = tokenizer.decode(prompt_ids)
        tools = offered(text)
        if not tools:
            return _reply(tokenizer, title)
        at = min(prompt_ids.count(result_id), len(steps) - 1)
        step = steps[at]
        if step.do is None and WATCHWORD in text:
            step = Step(say=step.say, do="run", command=f"echo {WATCHWORD}")
        return _reply(tokenizer, _spoken(step, tools))

    return script


def offered(prompt: str) -> dict[str, dict[str, Any]]:
    """The parameters (JSON schema) of each tool in a prompt of Qwen3's template, by name."""
    _, found, rest = prompt.partition(_TOOLS_BEGIN)
    listed, closed, _ = rest.partition("\n</tools>")
    if not found or not closed:
        return {}
    functions = (json.loads(line)["function"] for line in listed.split("\n") if line.strip())
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _spoken(step: Step, tools: Mapping[str, dict[str, Any]]) -> str:
    if step.do is None:
        return step.say
    name, arguments = _call(step, tools)
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{step.say}\n<tool_call>\n{call}\n</tool_call>"


def _call(step: Step, tools: Mapping[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    wishes: list[tuple[str, Mapping[str, str]]] = [("run", {"command": step.command})]
    if step.given is not None and step.do is not None:
        wishes.insert(0, (step.do, step.given))
    for kind, given in wishes:
        for name in _TOOLS[kind]:
            if name in tools and (arguments := arguments_for(tools[name], given)) is not None:
                return name, arguments
    raise ValueError(f"none of the tools offered can {step.do}: {', '.join(tools)}")


def arguments_for(schema: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any] | None:
    """``given`` under the names that the schema has for it, and what else it requires filled in; None
    where it has no place for something."""
    properties: dict[str, dict[str, Any]] = schema.get("properties") or {}
    made: dict[str, Any] = {}
    for what, value in given.items():
        name = next((name for name in _NAMES[what] if name in properties), None)
        if name is None:
            return _nested(properties, given)
        made[name] = _as_type(properties[name], value)
    for name in schema.get("required") or ():
        made.setdefault(name, _FILLER.get(_type(properties.get(name, {})), "scripted"))
    return made


def _nested(properties: Mapping[str, dict[str, Any]], given: Mapping[str, str]) -> dict[str, Any] | None:
    """A tool that takes a path, and a list of edits."""
    edits = properties.get("edits", {}).get("items")
    path = next((name for name in _NAMES["path"] if name in properties), None)
    if edits is None or path is None or "path" not in given:
        return None
    inner = arguments_for(edits, {what: value for what, value in given.items() if what != "path"})
    return None if inner is None else {path: given["path"], "edits": [inner]}


def _as_type(schema: Mapping[str, Any], value: str) -> Any:
    return ["bash", "-lc", value] if _type(schema) == "array" else value


def _type(schema: Mapping[str, Any]) -> str:
    """Some providers' schemas shout."""
    kind = schema.get("type", "string")
    return (kind if isinstance(kind, str) else kind[0]).lower()


def _reply(tokenizer: TinyTokenizer, text: str) -> Reply:
    return Reply(token_ids=tuple(tokenizer.encode(f"{text}<|im_end|>")))
