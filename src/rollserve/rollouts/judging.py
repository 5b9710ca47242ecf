"""What a grader may ask: the routes of the run that are for graders, in a session of their own.

A judge that fails is a grader's failure, and never a reward: neither when the grader's code swallows the
error, nor when the judge did not answer before the attempt's time was over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rollserve.agent.base import ModelClient, Reply
from rollserve.errors import GraderFailure, InfrastructureFailure
from rollserve.gateway.base import Session
from rollserve.records.call import Message


class Judges:
    """``agent.base.ModelClient`` for one grading. ``cut_off``: a call was stopped before its answer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._model: ModelClient = session.model
        self.cut_off = False

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        model: str | None = None,
    ) -> Reply:
        """Raises ``GraderFailure`` where the judge's backends fail."""
        try:
            return await self._model.chat(messages, tools=tools, max_tokens=max_tokens, model=model)
        except InfrastructureFailure as error:
            raise _failed(error) from error
        except asyncio.CancelledError:
            self.cut_off = True
            raise

    def check(self) -> None:
        """Once there is a grade: raises ``GraderFailure`` where the newest call failed all the same."""
        if self._session.trouble is not None:
            raise _failed(self._session.trouble)


def _failed(error: Exception) -> GraderFailure:
    return GraderFailure(f"a model that the grader asked: {error}", operation="grade.model")
