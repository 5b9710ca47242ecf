"""Writes the tasks from the project and its faults: ``python make.py [FOLDER]`` (default: here).

``task.json`` is the first of ``tasks.jsonl``. Its repository is made by ``prepare`` steps, once, and kept as
a layer of the image. ``task-without-prepare.json`` is the same for runtimes that prepare nothing
(``process``, ``remote``): the files are laid down as they are, without a history.
"""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGE = "tally"
SUITE = "python3 -I -m unittest discover -s tests"
"""``-I``: nothing of the environment, of a user's folder, or of the directory it starts in is imported."""

LOOK = "[ ! -d .git ] || git --no-pager diff --stat"
"""For the attempt's log. It reads the settings and hooks of the grading sandbox's own ``.git``."""


@dataclass(frozen=True)
class Fault:
    """A commit that went wrong."""

    path: str
    right: str
    wrong: str
    subject: str
    report: str


FAULTS = (
    Fault(
        path="tally/durations.py",
        right="{rest:02d}",
        wrong="{rest}",
        subject="Write durations without format codes",
        report="Sums like one hour and five minutes are printed as 1h5.",
    ),
    Fault(
        path="tally/report.py",
        right="for number, line in enumerate(lines, 1):",
        wrong="for number, line in enumerate(filter(str.strip, lines), 1):",
        subject="Pass over blank lines early",
        report="The number of a bad line is too small when there are blank lines above it.",
    ),
)


def project() -> dict[str, str]:
    """Its files as they should be, by their path."""
    root = HERE / "project"
    paths = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def broken(fault: Fault) -> str:
    text = project()[fault.path]
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.path} does not have once: {fault.right}")
    return text.replace(fault.right, fault.wrong)


def write(path: str, text: str) -> str:
    """A command."""
    return f"mkdir -p {shlex.quote(str(Path(path).parent))}\ncat > {path} <<'END OF FILE'\n{text}END OF FILE"


def commit(subject: str) -> str:
    return f"git add --all && git commit --quiet --message {shlex.quote(subject)}"


def history(fault: Fault) -> list[str]:
    """``prepare`` steps: a repository of two commits."""
    begin = [
        "set -e",
        "git init --quiet --initial-branch main .",
        "git config user.name Developer && git config user.email developer@example.org",
        *(write(path, text) for path, text in project().items()),
        commit("Add up a time sheet"),
    ]
    return ["\n".join(begin), "\n".join(["set -e", write(fault.path, broken(fault)), commit(fault.subject)])]


def task(fault: Fault, *, prepare: bool) -> dict[str, Any]:
    where = "The repository is your working directory" + ("; see `git log`. " if prepare else ". ")
    wish = f"Find the fault, mend it in {PACKAGE}/, and see that the project's tests pass: {SUITE}"
    instruction = f"{fault.report} {where}{wish}"
    made: dict[str, Any] = {"instruction": instruction}
    if prepare:
        made["prepare"] = history(fault)
    else:
        made["files"] = {**project(), fault.path: broken(fault)}
    grader = {"command": f"{LOOK}\n{SUITE}", "carry": [f"/workspace/{PACKAGE}"], "timeout_s": 60}
    return made | {
        "tools": ["bash", "str_replace_editor"],
        "grader": {"name": "command", "options": grader},
        "limits": {"max_turns": 40, "run_s": 600, "command_s": 60},
        "metadata": {"fault": fault.subject},
    }


def main(folder: Path) -> None:
    tasks = [task(fault, prepare=True) for fault in FAULTS]
    (folder / "task.json").write_text(json.dumps(tasks[0], indent=2) + "\n")
    (folder / "tasks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in tasks))
    plain = task(FAULTS[0], prepare=False)
    (folder / "task-without-prepare.json").write_text(json.dumps(plain, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else HERE)
