"""A worker: runs the attempts it is given, and tells the server what becomes of them.

It owns an attempt until the server has acknowledged its end: a report that could not be sent is sent
again with the next connection. It decides nothing about retries, and knows nothing of how messages
travel: ``connect`` hands it a way to send, ``handle`` takes what comes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rollserve.errors import FailureKind
from rollserve.executor.base import (
    AckAttempt,
    AttemptEnded,
    CancelAttempt,
    FromWorker,
    PolicyView,
    RegradingEnded,
    Shutdown,
    StageChanged,
    StartAttempt,
    StartRegrading,
    ToWorker,
    WorkerHello,
    WorkerStats,
)
from rollserve.records.regrade import Graded, RegradingState
from rollserve.records.rollout import Attempt, Failure, RolloutState, Stage
from rollserve.rollouts import vitals
from rollserve.rollouts.attempt import AttemptRunner
from rollserve.rollouts.clock import Cancellable, Deadline
from rollserve.rollouts.outcome import never_started
from rollserve.rollouts.regrading import RegradingRunner
from rollserve.rollouts.stages import StagePools, StageSlots
from rollserve.rollouts.tally import LoopLag
from rollserve.rollouts.warm import WarmRuntime
from rollserve.rollouts.worker_ports import WorkerPorts
from rollserve.sandbox.base import Sandbox
from rollserve.store.payload import Segment

logger = logging.getLogger(__name__)

Send = Callable[[FromWorker], bool]
"""Hands a message over without blocking; False when it was not taken."""

_STAGES_EVERY_S = 0.1
_STATS_EVERY_S = 1.0
_REAP_EVERY_S = 60.0
_REAP_WITHIN_S = 30.0
_CLOSE_AGAIN_S = 5.0
_GATEWAY_GAUGES = frozenset({"sessions", "in_flight", "waiting"})


class Worker:
    """``start``, then ``connect`` and ``handle``; ``stop`` in the end. The ports are closed by who
    made them, after ``stop``."""

    def __init__(
        self, ports: WorkerPorts, *, worker_id: str, slots: StageSlots, gateway_url: str = ""
    ) -> None:
        self.worker_id = worker_id
        self.shutdown: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Resolves to the grace in seconds once the server has asked for an end."""
        self._ports = ports
        self._clock = ports.clock
        self._slots = slots
        self._gateway_url = gateway_url
        self._pools = StagePools(slots)
        self._runners: dict[str, AttemptRunner] = {}
        self._unacknowledged: dict[str, AttemptEnded] = {}
        self._stages: dict[str, StageChanged] = {}
        self._stages_alarm: Cancellable | None = None
        self._counters: dict[str, float] = {}
        self._lag = LoopLag()
        self._attempts: set[asyncio.Task[None]] = set()
        self._regradings: set[asyncio.Task[None]] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._usable: list[str] = []
        self._send_now: Send | None = None
        self._stopping = False

    # -- life
    async def start(self) -> None:
        """Clear away what crashed workers left behind, and begin to tick."""
        reports = await asyncio.gather(
            *(asyncio.to_thread(runtime.report) for runtime in self._ports.runtimes.values())
        )
        self._usable = [report.name for report in reports if report.usable]
        await self._reap()
        self._chore(self._lag.run(), "lag")
        self._chore(self._every(_STATS_EVERY_S, self._send_stats), "stats")
        self._chore(self._every(_REAP_EVERY_S, self._reap), "reap")

    def connect(self, send: Send) -> None:
        """A new connection: say who we are, what runs, and every end that was not acknowledged."""
        self._send_now = send
        self.send(
            WorkerHello(
                worker_id=self.worker_id,
                pid=os.getpid(),
                capacity=self._slots.capacity,
                slots=self._slots.as_dict(),
                runtimes=self._usable,
                gateway_url=self._gateway_url,
            )
        )
        for ended in self._unacknowledged.values():
            self.send(ended)

    def disconnect(self) -> None:
        self._send_now = None

    def send(self, message: FromWorker) -> bool:
        return self._send_now is not None and self._send_now(message)

    async def stop(self, grace_s: float) -> None:
        """Let what runs end for ``grace_s`` seconds, then abandon and clean up the rest."""
        self._stopping = True
        if self._attempts and grace_s > 0:
            try:
                async with Deadline(self._clock, grace_s):
                    await asyncio.wait(list(self._attempts))
            except TimeoutError:
                logger.info("%d attempts did not end within %g s", len(self._attempts), grace_s)
        for runner in list(self._runners.values()):
            runner.abandon()
        if self._attempts:
            await asyncio.wait(list(self._attempts))
        for ours in (list(self._regradings), list(self._chores)):  # the former may leave some of the latter
            for task in ours:
                task.cancel()
            await asyncio.gather(*ours, return_exceptions=True)
        self._flush_stages()

    # -- what the server says
    def handle(self, message: ToWorker) -> None:
        """Never blocks, never raises."""
        try:
            self._handle(message)
        except Exception:  # an edge: one message that can't be served must not end the worker
            logger.exception("%s can't be handled", type(message).__name__)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case StartAttempt():
                self._start(message)
            case CancelAttempt():
                runner = self._runners.get(message.attempt_id)
                if runner is not None:
                    runner.cancel(message.reason)
            case PolicyView():
                self._ports.gateway.update_policy(message)
            case AckAttempt():
                self._acknowledged(message)
            case StartRegrading():
                self._own(self._regradings, self._grade(message), message.owner)
            case Shutdown():
                if not self.shutdown.done():
                    self.shutdown.set_result(message.grace_s)

    def _start(self, start: StartAttempt) -> None:
        if start.attempt_id in self._runners or start.attempt_id in self._unacknowledged or self._stopping:
            return
        segment: Segment | None = None
        try:
            segment = self._ports.payloads.open_segment(start.run_id, start.attempt_id)
            runner = AttemptRunner(
                start,
                segment,
                worker_id=self.worker_id,
                ports=self._ports,
                pools=self._pools,
                observer=self,
            )
        except Exception as error:  # an edge: whatever it is, the server must hear of it
            logger.exception("attempt %s can't be started", start.attempt_id)
            if segment is not None:
                segment.discard()
            self._ended(self._failed(start, error, "attempt.start"))
            return
        self._runners[start.attempt_id] = runner
        self._own(self._attempts, self._run(start, runner), start.attempt_id)

    async def _grade(self, start: StartRegrading) -> None:
        """A grading that breaks is told as failed; one that is cancelled is not told at all."""
        try:
            runner = RegradingRunner(start, ports=self._ports, pools=self._pools, observer=self)
            graded = await runner.run()
        except Exception as error:  # an edge: a bug of ours must not leave a grading stuck
            logger.exception("grading %s broke", start.owner)
            graded = Graded(state=RegradingState.FAILED, failure=_broken(error, "regrade"))
        self.count("gradings")
        self.send(
            RegradingEnded(
                regrade_id=start.regrade_id,
                rollout_id=start.rollout_id,
                tries=start.tries,
                graded_json=graded.model_dump_json().encode(),
            )
        )

    async def _run(self, start: StartAttempt, runner: AttemptRunner) -> None:
        try:
            attempt = await runner.run()
        except Exception as error:  # an edge: a bug of ours must not leave a rollout stuck
            logger.exception("attempt %s broke", start.attempt_id)
            attempt = self._failed(start, error, "attempt")
        finally:
            del self._runners[start.attempt_id]
        if attempt is not None:
            self._report_end(start, attempt)

    def _report_end(self, start: StartAttempt, attempt: Attempt) -> None:
        try:
            self._ended(attempt)
        except ValueError as error:  # text that is no UTF-8, say: the server must hear of it all the same
            logger.exception("the end of attempt %s can't be told", start.attempt_id)
            plain = str(error).encode("ascii", "backslashreplace").decode()
            self._ended(self._failed(start, ValueError(plain), "attempt.report"))

    def _failed(self, start: StartAttempt, error: Exception, operation: str) -> Attempt:
        return never_started(start, self.worker_id, self._clock.now(), _broken(error, operation))

    def _ended(self, attempt: Attempt) -> None:
        self.count("episodes" if attempt.outcome is RolloutState.COMPLETED else "episodes_without_grade")
        self._stages.pop(attempt.id, None)
        ended = AttemptEnded(attempt_json=attempt.model_dump_json().encode())
        self._unacknowledged[attempt.id] = ended
        self.send(ended)

    def _acknowledged(self, ack: AckAttempt) -> None:
        ended = self._unacknowledged.pop(ack.attempt_id, None)
        if ended is not None and not ack.accepted:
            ref = ended.attempt().payload
            if ref is not None:
                self._chore(self._forget_payload(ref), "forget")

    async def _forget_payload(self, ref: str) -> None:
        """Nobody else knows of it."""
        try:
            await self._ports.payloads.delete([ref])
        except Exception:  # an edge: the sweep at the next start removes it
            logger.exception("payload %s of a fenced attempt could not be deleted", ref)

    # -- what attempts tell (AttemptObserver)
    def stage_changed(self, attempt_id: str, stage: Stage) -> None:
        """Only the newest stage of an attempt is sent, a few times a second."""
        self._stages[attempt_id] = StageChanged(
            attempt_id=attempt_id, stage=stage.value, at=self._clock.now()
        )
        if self._stages_alarm is None:
            self._stages_alarm = self._clock.call_later(_STAGES_EVERY_S, self._flush_stages)

    def count(self, counter: str, by: float = 1) -> None:
        self._counters[counter] = self._counters.get(counter, 0) + by

    def close_later(self, sandboxes: Sequence[Sandbox], closed: Callable[[], None]) -> None:
        self._chore(self._close_at_last(list(sandboxes), closed), "close")

    async def _close_at_last(self, sandboxes: list[Sandbox], closed: Callable[[], None]) -> None:
        """Its slot stays taken meanwhile: a machine that can't end a sandbox must not get more of them."""
        while sandboxes:
            await self._clock.sleep(_CLOSE_AGAIN_S)
            try:
                async with Deadline(self._clock, self._ports.bounds.close_s):
                    await sandboxes[0].close()
            except Exception:  # an edge: it is tried again
                logger.exception("sandbox %s does not close", sandboxes[0].id)
                continue
            sandboxes.pop(0)
        closed()

    # -- chores
    def _flush_stages(self) -> None:
        if self._stages_alarm is not None:
            self._stages_alarm.cancel()
            self._stages_alarm = None
        changed, self._stages = self._stages, {}
        for change in changed.values():
            self.send(change)

    async def _send_stats(self) -> None:
        rss = await asyncio.to_thread(vitals.rss_mb)
        gateway = dict(self._ports.gateway.stats())
        backends = gateway.pop("backends", {})
        counters = {name: float(value) for name, value in gateway.items() if name not in _GATEWAY_GAUGES}
        for runtime in self._ports.runtimes.values():
            if isinstance(runtime, WarmRuntime):
                for name, value in runtime.counters().items():
                    counters[name] = counters.get(name, 0.0) + value
        self.send(
            WorkerStats(
                at=self._clock.now(),
                stages=self._pools.occupancy(),
                counters={**counters, **self._counters},
                loop_lag_ms_p99=self._lag.p99_ms,
                rss_mb=rss,
                cpu_s=vitals.cpu_s(),
                backends=backends,
            )
        )

    async def _reap(self) -> None:
        for name, runtime in self._ports.runtimes.items():
            try:
                async with Deadline(self._clock, _REAP_WITHIN_S):
                    reaped = await runtime.reap()
            except Exception:  # an edge: orphans are looked for again in a minute
                logger.exception("%s can't be reaped", name)
                continue
            if reaped:
                self.count("sandboxes_reaped", reaped)
                logger.warning("removed %d orphaned sandboxes of %s", reaped, name)

    async def _every(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await self._clock.sleep(seconds)
            try:
                await work()
            except Exception:  # an edge: a chore that fails once is tried again next time
                logger.exception("worker chore failed")

    def _chore(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._own(self._chores, work, f"worker-{name}")

    def _own(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _broken(error: Exception, operation: str) -> Failure:
    return Failure(
        kind=FailureKind.INFRASTRUCTURE,
        code="internal",
        message=f"{type(error).__name__}: {error}"[:2000],
        operation=operation,
    )
