"""One attempt, from its sandbox to its reward: init → ready → run → grade → release.

``AttemptRunner.run`` and ``_play`` are the whole story. What holds throughout:

* the stages' slots and budgets are entered here and nowhere else; waits for a slot are charged to
  nothing but the wall ceiling;
* before grading begins the agent's tools and generation have been stopped, its sandbox is closed and
  its run slot is free; a grader gets a fresh sandbox;
* every release has its own deadline and never masks the result; what could not be released stands in
  ``detail["release_errors"]``;
* whatever happened, calls and log are sealed: failed and cancelled attempts keep their history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollserve.agent.base import AgentResult, Episode, Toolbox, last_words
from rollserve.errors import (
    AgentFailure,
    AttemptCancelled,
    ContextTooLong,
    EpisodeFailure,
    GraderFailure,
    InexactTokens,
    InfrastructureFailure,
    LimitReached,
    forget_frames,
)
from rollserve.executor.base import StartAttempt
from rollserve.gateway.base import Ending, Session, SessionSpec
from rollserve.grader.base import Grade, Grading, check_grade
from rollserve.records.rollout import Attempt, Stage
from rollserve.records.run import RunStage
from rollserve.rollouts.attempt_log import AttemptLog
from rollserve.rollouts.clock import ActiveTimer, Deadline, Judge
from rollserve.rollouts.failures import boundary, usable
from rollserve.rollouts.forks import AgentsSandboxes
from rollserve.rollouts.holdings import Holdings, WantedSandbox
from rollserve.rollouts.judging import Judges, has_judges
from rollserve.rollouts.keepsakes import Carried, collect_artifacts, pack, unpack
from rollserve.rollouts.outcome import Cast, Outcome, finished
from rollserve.rollouts.stages import StagePools
from rollserve.rollouts.wanted import wanted_sandbox
from rollserve.rollouts.worker_ports import AttemptObserver, Keeper, WorkerPorts
from rollserve.sandbox.base import Sandbox
from rollserve.store.payload import EndState, Segment

T = TypeVar("T")


class AttemptRunner:
    """Runs one attempt, once. The segment is the attempt's: it is sealed here, or left as it stands for the
    server that finds the attempt interrupted."""

    def __init__(
        self,
        start: StartAttempt,
        segment: Segment,
        *,
        worker_id: str,
        ports: WorkerPorts,
        pools: StagePools,
        observer: AttemptObserver,
        keeper: Keeper | None = None,
    ) -> None:
        self._start = start
        self._task = start.task()
        self._run = start.run()
        self._segment = segment
        self._ports = ports
        self._observer = observer
        self._keeper = keeper
        self._place = pools.place()
        self._turns = pools.turns
        limits = self._task.limits
        self._timer = ActiveTimer(ports.clock, total_s=limits.total_s, wall_s=limits.wall_s)
        self._log = AttemptLog(segment, ports.bounds)
        self._held = Holdings(
            clock=ports.clock, log=self._log, close_s=ports.bounds.close_s, observer=observer
        )
        self._outcome = Outcome(start=start, worker_id=worker_id, started_at=ports.clock.now())
        self._judges: Judges | None = None
        self._asyncio_task: asyncio.Task[object] | None = None
        self._cancelled: str | None = None
        self._abandoned = False
        self._ending = False

    # -- the whole story
    async def run(self) -> Attempt | None:
        """Returns the finished attempt, or None when it was abandoned. A cancel that did not come
        through ``cancel`` or ``abandon`` is raised once everything is released."""
        self._asyncio_task = asyncio.current_task()
        try:
            with boundary("attempt", InfrastructureFailure, passes=EpisodeFailure, log=self._log):
                self._outcome.grade = await self._play()
        except EpisodeFailure as error:
            self._outcome.failure = error
        except asyncio.CancelledError:
            self._stopped()
        finally:
            self._ending = True
            await self._release()
            if self._abandoned:
                self._segment.leave()
        if self._abandoned:
            return None
        await self._seal()
        self._observer.stage_changed(self._start.attempt_id, Stage.DONE)
        forget_frames(self._outcome.failure)
        return finished(self._outcome, self._ports.clock.now(), self._ports.bounds.detail_bytes)

    async def _play(self) -> Grade:
        cast = await self._init()
        failed = await self._drive(cast)
        carried = await self._harvest(cast, failed)
        if failed is not None:
            raise failed
        self._check_exact(cast.session)
        return await self._grade(cast, carried)

    def cancel(self, reason: str) -> None:
        """End it as ``CANCELLED``; one that is ending already ends as it does."""
        if self._cancelled is None:
            self._cancelled = reason
            self._interrupt()

    def abandon(self) -> None:
        """Stop and clean up without a result: whoever asked for it is gone."""
        self._abandoned = True
        self._interrupt()

    # -- init
    async def _init(self) -> Cast:
        await self._wait(self._place.to_init)
        self._enter(Stage.INIT)
        with boundary("init", InfrastructureFailure, passes=EpisodeFailure, log=self._log):
            cast = await self._budgeted(Stage.INIT, "init_s", self._task.limits.init_s, self._prepare)
        self._place.to_ready()
        self._enter(Stage.READY)
        return cast

    async def _prepare(self) -> Cast:
        task, ports = self._task, self._ports
        with usable("agent", AgentFailure, self._log):
            agent = await ports.agents.resolve(task.agent)
            made_agent = agent.make(dict(task.agent.options))
        with usable("grader", GraderFailure, self._log):
            grader = await ports.graders.resolve(task.grader)
            made_grader = grader.make(dict(task.grader.options))
        self._outcome.code = {**agent.code, **grader.code}
        wanted = self._wanted_sandbox(agent.mounts(dict(task.agent.options)))
        sandboxes = AgentsSandboxes(self._held, ports, wanted, task.network)
        sandbox = await sandboxes.open()
        session = await ports.gateway.open_session(self._session_spec())
        self._held.hold_session(session)
        self._outcome.session = session
        return Cast(
            agent=made_agent, grader=made_grader, sandbox=sandbox, fork=sandboxes.fork, session=session
        )

    def _wanted_sandbox(self, mounts: dict[str, str] | None = None) -> WantedSandbox:
        """As the task wants it; closed by this attempt, and at the latest by its time to live."""
        kept_s = 0.0 if self._keeper is None else self._keeper.seconds
        ttl_s = self._timer.wall_left_s + self._ports.bounds.ttl_margin_s + kept_s
        owner = self._start.attempt_id
        return wanted_sandbox(self._task, self._ports, owner=owner, ttl_s=ttl_s, mounts=mounts)

    def _session_spec(self, stage: RunStage = "run") -> SessionSpec:
        return SessionSpec(
            attempt_id=self._start.attempt_id,
            rollout_id=self._start.rollout_id,
            run=self._run,
            limits=self._task.limits,
            segment=self._segment,
            clock=self._timer,
            stage=stage,
        )

    # -- run
    async def _drive(self, cast: Cast) -> EpisodeFailure | None:
        """Let the agent work. A budget that runs out marks its work, which is graded all the same.
        Returned is what ends the attempt, once its traces are collected."""
        await self._wait(self._place.to_run)
        self._enter(Stage.RUN)
        tools = await self._open_tools(cast.sandbox)
        if cast.grader.carry is not None:
            self._held.open_ahead(self._wanted_sandbox(), within_s=self._task.limits.init_s)
        limit_s = self._task.limits.run_s
        try:
            result = await self._budgeted(
                Stage.RUN,
                "run_s",
                limit_s,
                lambda: self._run_agent(cast, tools),
                judge=lambda: self._stalled(cast.session),
            )
        except LimitReached as error:
            if error.limit == "wall_s":
                return error
            self._log(f"truncated: {error}")
            result = AgentResult(answer=_said(cast.session), truncated_by=error.limit)
        except AgentFailure as error:
            trouble = cast.session.trouble
            if not isinstance(trouble, LimitReached) or trouble.limit == "wall_s":
                return trouble or error
            self._log(f"truncated: the agent ended on {trouble}")
            result = AgentResult(answer=_said(cast.session), truncated_by=trouble.limit)
        self._outcome.result = result
        return None

    async def _stalled(self, session: Session) -> InfrastructureFailure | None:
        """Before the agent is stopped for its time: was it lost on a backend?"""
        try:
            async with Deadline(self._ports.clock, self._ports.bounds.judge_s):
                return await session.stalled()
        except Exception as error:  # an edge: a question that fails must not keep the agent from its end
            self._log(f"whose time it was can't be told: {type(error).__name__}: {error}")
            return None

    async def _open_tools(self, sandbox: Sandbox) -> Toolbox:
        """In the run stage, so that nobody in the ready buffer holds a process for tools; charged to
        init's budget, as it is no time of the agent's."""
        opening = self._ports.open_toolbox(self._task, sandbox, log=self._log, pause=self._timer.pause)
        limit_s = self._task.limits.init_s
        with (
            boundary("tools.open", InfrastructureFailure, passes=EpisodeFailure, log=self._log),
            usable("tools.open", AgentFailure, self._log),
        ):
            tools = await self._budgeted(
                Stage.INIT, "init_s", limit_s, lambda: self._held.open_tools(opening)
            )
        self._outcome.code |= getattr(tools, "code", {})
        return tools

    async def _run_agent(self, cast: Cast, tools: Toolbox) -> AgentResult:
        session = cast.session
        episode = Episode(
            task=self._task,
            tools=tools,
            model=session.model,
            log=self._log,
            base_url=session.base_url,
            api_key=session.secret,
            pause=self._timer.pause,
            sandbox=cast.sandbox,
            reach=lambda: self._open_way(cast),
            fork=cast.fork,
            session=session,
        )
        passes = (InfrastructureFailure, LimitReached)
        with boundary("agent", AgentFailure, passes=passes, log=self._log):
            try:
                result = await cast.agent.run(episode)
            except ContextTooLong as error:
                raise LimitReached("context_tokens", str(error), operation="agent") from error
            if not isinstance(result, AgentResult):
                raise AgentFailure(f"returned {type(result).__name__}, not AgentResult", operation="agent")
        return result

    async def _open_way(self, cast: Cast) -> str:
        """The session's base URL as the sandbox sees it."""
        address = self._ports.session_addresses.get(self._task.runtime or self._ports.default_runtime)
        if address is not None:
            return await self._held.open_session_address(address, cast.session, cast.sandbox)
        return await self._held.open_session_socket(self._ports.serve_session, cast.session, cast.sandbox)

    async def _harvest(self, cast: Cast, failed: EpisodeFailure | None) -> Carried:
        """Stop the agent's side for good, take what is to be kept, free sandbox and slot. Returns the
        files that the grader wants carried over."""
        await self._held.stop_agent_side(self._session_ending())
        self._go_on()
        carried = Carried()
        if not isinstance(failed, LimitReached):
            carried = await self._collect(cast, carry=failed is None)
            if failed is None:
                await self._keep_end(cast)
        self._keep_sandbox()
        await self._leave()
        return carried

    async def _collect(self, cast: Cast, *, carry: bool) -> Carried:
        bounds = self._ports.bounds
        paths = (cast.grader.carry or ()) if carry else ()
        try:
            async with Deadline(self._ports.clock, bounds.collect_s):
                await collect_artifacts(
                    cast.sandbox, self._task.artifacts, self._segment, bounds=bounds, log=self._log
                )
                if not paths:
                    return Carried()
                name = self._start.attempt_id
                return await pack(cast.sandbox, paths, name=name, bounds=bounds, log=self._log)
        except TimeoutError as error:
            if paths:
                raise InfrastructureFailure(f"the files to grade: {error}", operation="carry") from error
            self._log(f"artifacts: {error}")
        return Carried()

    async def _keep_end(self, cast: Cast) -> None:
        """What another grader would need, some day. Files that can't be kept are a line in the log."""
        paths, bounds = self._run.keep_files, self._ports.bounds
        end = EndState(answer=self._outcome.result.answer)
        if paths:
            try:
                async with Deadline(self._ports.clock, bounds.collect_s):
                    name = f"kept-{self._start.attempt_id}"
                    kept = await pack(cast.sandbox, paths, name=name, bounds=bounds, log=self._log)
                end = EndState(answer=end.answer, paths=paths, workspace=kept.workspace, root=kept.root)
            except (EpisodeFailure, TimeoutError) as error:
                self._log(f"keep_files: {error}")
        self._segment.append_end(end)

    def _check_exact(self, session: Session) -> None:
        inexact = session.counts.get("inexact", 0)
        if inexact and self._run.on_inexact == "fail":
            raise InexactTokens(
                f"{inexact} calls are not token-exact, and the run says fail", operation="run"
            )
        rewritten = session.counts.get("rewritten", 0)
        if rewritten and self._run.rewrites == "fail":
            raise InexactTokens(
                f"{rewritten} requests rewrote what came before, and the run says fail", operation="run"
            )

    # -- grade
    async def _grade(self, cast: Cast, carried: Carried) -> Grade:
        await self._wait(self._place.to_grade)
        self._enter(Stage.GRADE)
        limit_s = self._task.limits.grade_s
        try:
            grade = await self._budgeted(
                Stage.GRADE, "grade_s", limit_s, lambda: self._ask_grader(cast, carried)
            )
        except LimitReached as error:
            waited = self._judges is not None and self._judges.cut_off
            if error.limit == "wall_s" and not waited:
                raise
            raise GraderFailure(f"not done in time: {error}", operation="grade") from error
        if grade.call_rewards:
            self._segment.append_call_rewards(grade.call_rewards)
        return grade

    async def _ask_grader(self, cast: Cast, carried: Carried) -> Grade:
        judges = self._judges = await self._open_judges()
        grading = Grading(
            task=self._task,
            answer=self._outcome.result.answer,
            conversation=cast.session.conversation(),
            call_ids=cast.session.call_ids,
            log=self._log,
            pause=self._timer.pause,
            sandbox=await self._grading_sandbox(cast.grader.carry, carried),
            model=judges,
        )
        with boundary("grade", GraderFailure, log=self._log):
            grade = await cast.grader.grade(grading)
            if judges is not None:
                judges.check()
            return check_grade(grade, grading.call_ids, operation="grade")

    async def _open_judges(self) -> Judges | None:
        if not has_judges(self._run):
            return None
        session = await self._ports.gateway.open_session(self._session_spec("grade"))
        self._held.hold_session(session)
        self._outcome.judged_in = session
        return Judges(session)

    async def _grading_sandbox(self, paths: tuple[str, ...] | None, carried: Carried) -> Sandbox | None:
        if paths is None:
            return None
        sandbox = await self._held.take_ahead() or await self._held.open_sandbox(self._wanted_sandbox())
        with boundary("carry", InfrastructureFailure, log=self._log):
            name = self._start.attempt_id
            await unpack(sandbox, carried, paths, name=name, timeout_s=self._task.limits.grade_s)
        return sandbox

    # -- release and end
    async def _release(self) -> None:
        """What is still held. Nothing here raises but a second cancel."""
        await self._held.stop_agent_side(self._session_ending())
        if self._outcome.failure is not None and self._cancelled is None and not self._abandoned:
            self._keep_sandbox()
        await self._held.drop_ahead()
        await self._leave()

    async def _leave(self) -> None:
        """Give the slot back once the sandbox that took it is confirmed gone: one that won't close is left
        to the worker, and the slot with it."""
        await self._held.close_sandboxes()
        left = self._held.give_up_sandboxes()
        if left:
            self._observer.close_later(left, self._place.detach())
        self._place.release()

    def _session_ending(self) -> Ending:
        if self._abandoned:
            return Ending.STOPPING
        return Ending.ENDED if self._cancelled is None else Ending.CANCELLED

    def _keep_sandbox(self) -> None:
        """Once, where somebody wants to look inside."""
        if self._keeper is not None and self._outcome.kept_sandbox is None:
            self._outcome.kept_sandbox = self._held.hand_over(self._keeper)

    async def _seal(self) -> None:
        """A result whose payload is lost is none: it fails as ours, unless it had failed already."""
        outcome = self._outcome
        why = str(outcome.failure).partition("\n")[0] if outcome.failure else None
        self._log(f"ended: {why or f'reward {outcome.grade and outcome.grade.reward}'}")
        try:
            async with Deadline(self._ports.clock, self._ports.bounds.seal_s):
                outcome.payload = await self._segment.seal()
        except Exception as error:  # an edge: the payload store is on a disk, which can do anything
            self._held.note(f"payload.seal: {type(error).__name__}: {error}")
            lost = InfrastructureFailure(f"the payload can't be kept: {error}", operation="payload.seal")
            outcome.failure = outcome.failure or lost
        outcome.troubles = self._held.errors + self._log.trouble

    # -- time, stages and cancels
    async def _budgeted(
        self,
        stage: Stage,
        name: str,
        budget_s: float,
        work: Callable[[], Awaitable[T]],
        *,
        judge: Judge | None = None,
    ) -> T:
        """Do ``work`` charged to a stage's budget and, but for grading, to the attempt's. Grading has
        its own: what an agent did until ``total_s`` ran out is graded too."""
        timings = self._outcome.timings
        used_s = timings.get(stage.value, 0.0)
        within_total = stage is not Stage.GRADE
        scope = self._timer.limit(name, budget_s - used_s, within_total=within_total, judge=judge)
        try:
            async with scope:
                return await work()
        except LimitReached as error:
            if stage is Stage.INIT and error.limit == "init_s":
                raise InfrastructureFailure(f"not ready in time: {error}", operation="init") from error
            raise
        finally:
            timings[stage.value] = used_s + scope.used_s

    async def _wait(self, place: Callable[[], Awaitable[None]]) -> None:
        """Wait for a slot: charged to nothing, ended by the wall ceiling."""
        self._go_on()
        async with self._timer.ceiling():
            await place()
            await self._turns.take()

    def _go_on(self) -> None:
        """Raises ``AttemptCancelled`` where a cancel came before the task began, or during a release."""
        if self._cancelled is not None or self._abandoned:
            raise AttemptCancelled(self._cancelled or "abandoned", operation="cancel")

    def _enter(self, stage: Stage) -> None:
        self._log(f"stage: {stage.value}")
        self._observer.stage_changed(self._start.attempt_id, stage)

    def _interrupt(self) -> None:
        if self._asyncio_task is not None and not self._ending and not self._held.releasing:
            self._asyncio_task.cancel()

    def _stopped(self) -> None:
        """A cancel came through. From here on only the releases run; one that is not ours goes on
        afterwards."""
        if self._cancelled is None and not self._abandoned:
            self._abandoned = True
            raise asyncio.CancelledError
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        self._outcome.failure = AttemptCancelled(self._cancelled or "abandoned", operation="cancel")


def _said(session: Session) -> str | None:
    """The answer of an agent that was stopped before it could give one."""
    return last_words(session.conversation())
