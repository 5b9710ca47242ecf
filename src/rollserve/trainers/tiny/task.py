"""The look-up task: the answer stands in a file that another file names.

The user says ``lookup q``. File ``q`` holds ``see k``, file ``k`` holds ``47``; two more files lead
elsewhere. The policy has to read ``q``, read ``k``, and answer ``47``: three turns and two commands in
the sandbox. Nothing in the prompt tells the answer, so a guess is right once in a hundred.

Two more kinds make a mix of difficulty (``Mix``). Easy: ``answer 47``, one turn, which the policy is
warm-started to solve nearly always. Hard: ``lookup q`` as above, but the answer has six digits, of which it
was never shown more than two.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from string import ascii_lowercase
from typing import Any, TypedDict

KEYS = ascii_lowercase
DIGITS = "0123456789"
HARD_DIGITS = 6

SHELL_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in a persistent shell.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
"""The service's schema of its ``shell`` tool: the model is warm-started on prompts that hold it."""


class LookupTask(TypedDict):
    """``files`` are relative to the sandbox's working directory."""

    instruction: str
    files: dict[str, str]
    answer: str


def make_task(rng: Random) -> LookupTask:
    """One of 65,000 chains (26 keys, 25 next keys, 100 answers), with a decoy chain beside it."""
    first, second, decoy, decoy_end = rng.sample(KEYS, 4)
    answer, other = (f"{number:02d}" for number in rng.sample(range(100), 2))
    files = {
        first: f"see {second}\n",
        second: f"{answer}\n",
        decoy: f"see {decoy_end}\n",
        decoy_end: f"{other}\n",
    }
    return {"instruction": instruction(first), "files": files, "answer": answer}


def make_easy(rng: Random) -> LookupTask:
    """Nothing to look up; and a file that is not asked for."""
    answer, wrong = (f"{number:02d}" for number in rng.sample(range(100), 2))
    files = {rng.choice(KEYS): f"{wrong}\n"}
    return {"instruction": easy_instruction(answer), "files": files, "answer": answer}


def make_hard(rng: Random) -> LookupTask:
    """The same chain, with an answer of ``HARD_DIGITS`` digits."""
    made = make_task(rng)
    answer = f"{rng.randrange(10**HARD_DIGITS):0{HARD_DIGITS}d}"
    files = {
        name: f"{answer}\n" if text == f"{made['answer']}\n" else text for name, text in made["files"].items()
    }
    return {**made, "files": files, "answer": answer}


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the tasks that the policy always solves, and never; the others are what it can learn."""

    easy: float = 0.375
    hard: float = 0.375

    def draw(self, rng: Random) -> LookupTask:
        at = rng.random()
        if at < self.easy:
            return make_easy(rng)
        return make_hard(rng) if at < self.easy + self.hard else make_task(rng)


def instruction(key: str) -> str:
    return f"lookup {key}"


def easy_instruction(answer: str) -> str:
    return f"answer {answer}"


def read_command(key: str) -> str:
    return f"cat {key}"


def pointer(key: str) -> str:
    """What the shell tool answers when a file points to ``key``."""
    return f"see {key}"


def missing(key: str) -> str:
    """What the shell tool answers for a file that does not exist."""
    return f"cat: {key}: No such file or directory\n[exit code 1]"


def simulate(command: str, files: dict[str, str]) -> str:
    """What the shell tool would answer to ``command``, for tests without a sandbox."""
    name, _, path = command.partition(" ")
    if name != "cat":
        return f"bash: {name}: command not found\n[exit code 127]"
    return files[path].rstrip("\n") if path in files else missing(path)
