"""What a grader may ask: the routes of the run that are for graders, in a session of their own.

A judge that fails is a grader's failure, and never a reward: neither when the grader's code swallows the
error, nor when the judge did not answer before the attempt's time was over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ParamSpec

from rollserve.agent.base import Reply
from rollserve.errors import GraderFailure, InfrastructureFailure
from rollserve.gateway.base import Session
from rollserve.records.run import RunSpec

P = ParamSpec("P")


def has_judges(run: RunSpec) -> bool:
    return any("grade" in route.stages for route in run.routes.values())


class Judges:
    """``agent.base.ModelClient`` for one grading. ``chat`` raises ``GraderFailure`` where the backends of the
    judge fail."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._cut = _Cut()
        self.chat = _of_a_grader(session.model.chat, self._cut)
        self.show = session.model.show

    @property
    def cut_off(self) -> bool:
        """A call was stopped before its answer."""
        return self._cut.off

    def check(self) -> None:
        """Once there is a grade: raises ``GraderFailure`` where the newest call failed all the same."""
        if self._session.trouble is not None:
            raise _failed(self._session.trouble)


@dataclass(slots=True)
class _Cut:
    off: bool = False


def _of_a_grader(
    chat: Callable[P, Coroutine[Any, Any, Reply]], cut: _Cut
) -> Callable[P, Coroutine[Any, Any, Reply]]:
    async def ask(*args: P.args, **kwargs: P.kwargs) -> Reply:
        try:
            return await chat(*args, **kwargs)
        except InfrastructureFailure as error:
            raise _failed(error) from error
        except asyncio.CancelledError:
            cut.off = True
            raise

    return ask


def _failed(error: Exception) -> GraderFailure:
    return GraderFailure(f"a model that the grader asked: {error}", operation="grade.model")
