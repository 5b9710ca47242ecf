"""A stored attempt, graded once more: in a grade slot, in a fresh sandbox where the grader wants one.

What the grader gets to see is what was kept: calls, the whole answer, and those files that the run keeps
(``keep_files``). Where that is not enough the grading is impossible, and says why; it is no failure, and
no try of it would end otherwise. No policy is run but those that the grader asks, in a session of its own:
what they say is recorded until the server has counted it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rollserve.errors import (
    EpisodeFailure,
    GraderFailure,
    InfrastructureFailure,
    LimitReached,
    NotFound,
    forget_frames,
)
from rollserve.executor.base import StartRegrading
from rollserve.gateway.base import Ending, SessionSpec
from rollserve.grader.base import Grade, Grader, Grading, check_grade
from rollserve.records.regrade import Graded, RegradingState
from rollserve.rollouts.attempt_log import AttemptLog, Lines
from rollserve.rollouts.clock import ActiveTimer
from rollserve.rollouts.conversation import conversation
from rollserve.rollouts.failures import boundary, failure_of, plain_json, usable
from rollserve.rollouts.holdings import Holdings
from rollserve.rollouts.judging import Judges, has_judges
from rollserve.rollouts.keepsakes import Carried, missing_of, unpack
from rollserve.rollouts.outcome import ANSWER_CHARS
from rollserve.rollouts.stages import StagePools
from rollserve.rollouts.wanted import wanted_sandbox
from rollserve.rollouts.worker_ports import AttemptObserver, WorkerPorts
from rollserve.sandbox.base import Sandbox
from rollserve.store.payload import AttemptPayload, EndState, Segment

_LOG_LINES = 200


class Impossible(Exception):
    """What the grader needs was not kept."""


class RegradingRunner:
    """One grading, run once. Cancelled, it releases what it holds and says nothing: the server grades anew
    what a lost worker had."""

    def __init__(
        self, start: StartRegrading, *, ports: WorkerPorts, pools: StagePools, observer: AttemptObserver
    ) -> None:
        self._start = start
        self._task = start.task()
        self._run = start.run()
        self._ports = ports
        self._observer = observer
        self._place = pools.place()
        self._turns = pools.turns
        limits = self._task.limits
        self._timer = ActiveTimer(ports.clock, total_s=limits.grade_s, wall_s=limits.wall_s)
        self._lines = Lines(_LOG_LINES)
        self._log: Callable[[str], None] = AttemptLog(self._lines, ports.bounds)
        self._held = Holdings(
            clock=ports.clock, log=self._log, close_s=ports.bounds.close_s, observer=observer
        )
        self._code: dict[str, str] = {}
        self._segment: Segment | None = None

    async def run(self) -> Graded:
        began = time.monotonic()
        try:
            with boundary(
                "regrade", InfrastructureFailure, passes=(EpisodeFailure, Impossible), log=self._log
            ):
                graded = self._graded(await self._play())
        except Impossible as error:
            graded = Graded(state=RegradingState.IMPOSSIBLE, note=str(error))
        except EpisodeFailure as error:
            graded = Graded(state=RegradingState.FAILED, failure=failure_of(error))
            forget_frames(error)
        finally:
            await self._release()
        facts = {"code": self._code, "log": self._lines.kept, "seconds": time.monotonic() - began}
        return graded.model_copy(update=facts)

    async def _play(self) -> Grade:
        limits = self._task.limits
        async with self._timer.ceiling():
            await self._place.to_grade()
            await self._turns.take()
        try:
            async with self._timer.limit("grade_s", limits.grade_s, within_total=False):
                return await self._ask()
        except LimitReached as error:
            raise GraderFailure(f"not done in time: {error}", operation="grade") from error

    async def _ask(self) -> Grade:
        payload = await self._payload()
        with usable("grader", GraderFailure, self._log):
            entry = await self._ports.graders.resolve(self._task.grader)
            grader = entry.make(dict(self._task.grader.options))
        self._code = dict(entry.code)
        call_ids = [call.id for call in payload.calls]
        judges = await self._open_judges()
        grading = Grading(
            task=self._task,
            answer=self._answer(payload),
            conversation=conversation(payload.calls),
            call_ids=call_ids,
            log=self._log,
            pause=self._timer.pause,
            sandbox=await self._sandbox(grader, payload.end),
            model=judges,
        )
        with boundary("grade", GraderFailure, log=self._log):
            grade = await grader.grade(grading)
            if judges is not None:
                judges.check()
            return check_grade(grade, call_ids, operation="grade")

    async def _open_judges(self) -> Judges | None:
        if not has_judges(self._run):
            return None
        start = self._start
        self._segment = self._ports.payloads.open_segment(start.run_id, start.owner)
        spec = SessionSpec(
            attempt_id=start.owner,
            rollout_id=start.rollout_id,
            run=self._run,
            limits=self._task.limits,
            segment=self._segment,
            clock=self._timer,
            stage="grade",
        )
        session = await self._ports.gateway.open_session(spec)
        self._held.hold_session(session)
        return Judges(session)

    async def _payload(self) -> AttemptPayload:
        attempt = self._start.attempt()
        if attempt.payload is None:
            raise Impossible("nothing was kept of the attempt")
        try:
            return await self._ports.payloads.read(attempt.payload)
        except NotFound as error:
            raise Impossible(error.message) from error

    def _answer(self, payload: AttemptPayload) -> str | None:
        """Attempts from before answers were kept whole have them in their record, if they are short."""
        if payload.end is not None:
            return payload.end.answer
        answer: str | None = self._start.attempt().detail.get("answer")
        if answer is not None and len(answer) >= ANSWER_CHARS:
            raise Impossible(f"only the first {ANSWER_CHARS} characters of the answer were kept")
        return answer

    async def _sandbox(self, grader: Grader, end: EndState | None) -> Sandbox | None:
        paths = grader.carry
        if paths is None:
            return None
        kept = None if end is None else end.paths
        if missing := missing_of(paths, kept or ()):
            raise Impossible(
                f"the grader wants {', '.join(missing)} of the run's sandbox, which was not kept: "
                "the run's keep_files says what is"
            )
        ttl_s = self._timer.wall_left_s + self._ports.bounds.ttl_margin_s
        wanted = wanted_sandbox(self._task, self._ports, owner=self._start.owner, ttl_s=ttl_s)
        sandbox = await self._held.open_sandbox(wanted)
        if end is not None:
            carried = Carried(workspace=end.workspace, root=end.root)
            with boundary("carry", InfrastructureFailure, log=self._log):
                name, timeout_s = self._start.owner, self._task.limits.grade_s
                await unpack(sandbox, carried, paths, name=name, timeout_s=timeout_s)
        return sandbox

    def _graded(self, grade: Grade) -> Graded:
        detail = plain_json(grade.detail, self._ports.bounds.detail_bytes) if grade.detail else {}
        return Graded(
            state=RegradingState.GRADED,
            reward=float(grade.reward),
            call_rewards=grade.call_rewards,
            detail=detail,
        )

    async def _release(self) -> None:
        await self._held.stop_agent_side(Ending.ENDED)
        if self._segment is not None:
            self._segment.leave()
        await self._held.close_sandboxes()
        left = self._held.give_up_sandboxes()
        if left:
            self._observer.close_later(left, self._place.detach())
        self._place.release()
