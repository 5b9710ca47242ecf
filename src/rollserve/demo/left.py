"""What a demo leaves in its folder, and what to type with it next."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

TRAINED = "trained"
"""The model as it was after the last step: weights and tokenizer."""

TASK = "task.json"
"""One that it was not trained on."""


def next_steps(output: Path, *, allow_unsafe: bool) -> list[tuple[str, list[str]]]:
    """What for, and the commands: each is a line, to be copied whole."""
    rollserve = _tool("rollserve")
    trained = shlex.quote(str(output / TRAINED))
    unsafe = " --allow-unsafe-runtime" if allow_unsafe else ""
    return [
        (
            "the trained model at work: serve it, and give it a task from another terminal",
            [
                f"{_tool('python')} -m rollserve.localserver --model {trained}",
                f"{rollserve} try {shlex.quote(str(output / TASK))} --backend http://127.0.0.1:8300 "
                f"--model {TRAINED} --tokenizer {trained} --renderer-option enable_thinking=false{unsafe}",
            ],
        ),
        (
            "the demo's runs and rollouts: open what it left, and look at it from another terminal",
            [f"{rollserve} serve --data-dir {shlex.quote(str(output / 'data'))}", f"{rollserve} status"],
        ),
        ("what this machine can do", [f"{rollserve} doctor"]),
        ("your own agent, task and trainer: docs/quickstart.md", []),
    ]


def _tool(name: str) -> str:
    """A command of this environment, by a path as short as it can be from here."""
    place = Path(sys.executable).parent / name
    here = Path.cwd()
    return shlex.quote(str(place.relative_to(here) if place.is_relative_to(here) else place))
