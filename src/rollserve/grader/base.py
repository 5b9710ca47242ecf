"""The contract of a grader: what turns an attempt's end state into a reward.

A crash or a time-out of a grader is a ``GraderFailure``, never a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rollserve.agent.base import ModelClient
from rollserve.errors import GraderFailure
from rollserve.records.call import Message
from rollserve.records.sample import is_reward
from rollserve.records.task import Task
from rollserve.sandbox.base import Sandbox


@dataclass(frozen=True, kw_only=True)
class Grading:
    """What a grader sees: the task, the answer, the conversation of the last path (model turns
    included), the ids of all calls in order, and a *fresh* sandbox with the carried files where the
    grader asked for one. ``log`` keeps a line with the attempt. Time inside ``pause()`` (waiting for
    a slot) is not charged to the attempt's budgets. ``model`` asks the run's routes for graders, by name
    (``model.chat(…, model="judge")``; in a code host a plain function's returns when it is answered); None
    where the run has none, and in gradings of stored attempts."""

    task: Task
    answer: str | None
    conversation: Sequence[Message]
    call_ids: Sequence[str]
    log: Callable[[str], None]
    sandbox: Sandbox | None = None
    model: ModelClient | None = None
    pause: Callable[[], AbstractContextManager[None]] = nullcontext


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """``reward`` must be finite. ``call_rewards`` by call id replace the single reward at the end of
    the path in the sample's ``rewards``. ``detail`` is kept with the result."""

    reward: float
    call_rewards: dict[str, float] = {}
    detail: dict[str, Any] = {}


def check_grade(grade: Grade, call_ids: Sequence[str], *, operation: str) -> Grade:
    """``grade`` itself. Raises ``GraderFailure`` for what is no grade, a reward that training can't use, or
    one for a call that never took place."""
    if not isinstance(grade, Grade):
        raise GraderFailure(f"returned {type(grade).__name__}, not Grade", operation=operation)
    for name, reward in {"reward": grade.reward, **grade.call_rewards}.items():
        if not isinstance(reward, (int, float)) or not is_reward(reward):
            raise GraderFailure(f"{name} is {reward}, which is no reward", operation=operation)
    if unknown := grade.call_rewards.keys() - set(call_ids):
        raise GraderFailure(f"no such call: {min(unknown)!r}", operation=operation)
    return grade


class Grader(Protocol):
    @property
    def carry(self) -> tuple[str, ...] | None:
        """None: no sandbox wanted. Otherwise the paths of the run sandbox that are carried over into
        a fresh grading sandbox (``("/workspace",)``; empty: nothing carried)."""

    async def grade(self, grading: Grading) -> Grade: ...


@dataclass(frozen=True, kw_only=True)
class GraderEntry:
    """How a name is made. ``check`` raises ``InvalidInput`` for bad options, before anything starts."""

    name: str
    make: Callable[[dict[str, Any]], Grader]
    check: Callable[[dict[str, Any]], None]
    code: dict[str, str] = field(default_factory=dict)
