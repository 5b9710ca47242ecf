"""What every executor must do. Subclass it in a test module and give it a ``subject`` whose workers are
``rollserve.testing.worker_process`` or do as it does (pytest, asyncio mode ``auto``)::

    class TestMine(ExecutorConformance):
        @pytest.fixture
        async def subject(self) -> AsyncIterator[ExecutorSubject]:
            async with listening(MyExecutor(count=2)) as subject:
                yield subject
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from rollserve.executor.base import (
    AckAttempt,
    AttemptEnded,
    CancelAttempt,
    Executor,
    FromWorker,
    PolicyView,
    WorkerHello,
    WorkerLost,
    WorkerStats,
)
from rollserve.records.policy import Policy, PolicySpec
from rollserve.records.rollout import RolloutState
from rollserve.testing.attempt_bench import AttemptBench

M = TypeVar("M")
DEADLINE_S = 60.0


class ExecutorSubject:
    """An executor, and all that its workers have said. ``kill`` ends a worker's process the hard way."""

    def __init__(self, executor: Executor, kill: Callable[[WorkerHello], None] | None = None) -> None:
        self.executor = executor
        self.kill = kill or (lambda hello: os.kill(hello.pid, signal.SIGKILL))
        self.heard: list[tuple[str, FromWorker | WorkerLost]] = []
        self.ended = False
        self._news = asyncio.Event()

    async def listen(self) -> None:
        async for report in self.executor.reports():
            self.heard.append(report)
            self._news.set()
        self.ended = True
        self._news.set()

    def all(self, kind: type[M]) -> list[tuple[str, M]]:
        return [(name, message) for name, message in self.heard if isinstance(message, kind)]

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not happened():
                self._news.clear()
                await self._news.wait()

    async def nth(self, kind: type[M], number: int = 1) -> tuple[str, M]:
        """The ``number``-th message of a kind, and whose it is."""
        await self.until(lambda: len(self.all(kind)) >= number)
        return self.all(kind)[number - 1]


@asynccontextmanager
async def listening(executor: Executor) -> AsyncIterator[ExecutorSubject]:
    await executor.start()
    subject = ExecutorSubject(executor)
    task = asyncio.create_task(subject.listen())
    try:
        yield subject
    finally:
        await executor.stop(0)
        await asyncio.wait_for(task, DEADLINE_S)


def policy_view(name: str, revision: int) -> PolicyView:
    policy = Policy(spec=PolicySpec(name=name, model="m", tokenizer="tiny"), version=revision)
    return PolicyView(revision=revision, policy_json=policy.model_dump_json().encode(), backends_json=[])


class ExecutorConformance:
    """The subclass brings the fixture ``subject``, with two workers."""

    async def test_every_worker_has_a_name_of_its_own(self, subject: ExecutorSubject) -> None:
        await subject.nth(WorkerHello, 2)
        names = [name for name, _ in subject.all(WorkerHello)]
        assert len(set(names)) == len(names)
        assert all(hello.worker_id == name for name, hello in subject.all(WorkerHello))

    async def test_attempts_go_there_and_ends_come_back(self, subject: ExecutorSubject) -> None:
        await subject.nth(WorkerHello, 2)
        for number, (name, _) in enumerate(subject.all(WorkerHello)):
            assert subject.executor.send(name, AttemptBench.start_message(f"a{number}"))
        await subject.nth(AttemptEnded, 2)
        for name, ended in subject.all(AttemptEnded):
            assert ended.attempt().worker_id == name
            assert ended.attempt().reward == 1.0
            assert subject.executor.send(name, AckAttempt(attempt_id=ended.attempt().id, accepted=True))

    async def test_a_cancel_gets_through(self, subject: ExecutorSubject) -> None:
        name, _ = await subject.nth(WorkerHello)
        subject.executor.send(name, AttemptBench.start_message("a", agent="hang"))
        subject.executor.send(name, CancelAttempt(attempt_id="a", reason="not wanted"))
        _, ended = await subject.nth(AttemptEnded)
        assert ended.attempt().outcome is RolloutState.CANCELLED

    async def test_nobody_is_sent_nothing(self, subject: ExecutorSubject) -> None:
        assert not subject.executor.send("nobody", AckAttempt(attempt_id="a", accepted=True))

    async def test_a_killed_worker_is_reported_and_replaced(self, subject: ExecutorSubject) -> None:
        await subject.nth(WorkerHello, 2)
        name, hello = await subject.nth(WorkerHello)
        subject.kill(hello)
        assert (await subject.nth(WorkerLost))[0] == name
        assert not subject.executor.send(name, AckAttempt(attempt_id="a", accepted=True))
        other, _ = await subject.nth(WorkerHello, 3)
        assert other != name
        subject.executor.send(other, AttemptBench.start_message("a"))
        assert (await subject.nth(AttemptEnded))[0] == other

    async def test_a_worker_that_dies_of_an_attempt_takes_no_other_along(
        self, subject: ExecutorSubject
    ) -> None:
        await subject.nth(WorkerHello, 2)
        (dying, _), (other, _) = subject.all(WorkerHello)[:2]
        subject.executor.send(dying, AttemptBench.start_message("a", agent="die"))
        assert (await subject.nth(WorkerLost))[0] == dying
        subject.executor.send(other, AttemptBench.start_message("b"))
        assert (await subject.nth(AttemptEnded))[0] == other

    async def test_late_joiners_know_every_policy(self, subject: ExecutorSubject) -> None:
        await subject.nth(WorkerHello, 2)
        for name, revision in (("p", 1), ("q", 7), ("p", 30)):
            subject.executor.broadcast(policy_view(name, revision))
        first, hello = await subject.nth(WorkerHello)
        subject.kill(hello)
        late, _ = await subject.nth(WorkerHello, 3)
        assert late != first
        await subject.until(lambda: any(name == late for name, _ in subject.all(WorkerStats)))
        stats = next(stats for name, stats in subject.all(WorkerStats) if name == late)
        assert stats.counters["policy_revisions"] == 37

    async def test_stop_hands_in_what_ends_in_time(self, subject: ExecutorSubject) -> None:
        name, _ = await subject.nth(WorkerHello)
        subject.executor.send(name, AttemptBench.start_message("a"))
        await subject.executor.stop(5)
        await subject.until(lambda: subject.ended)
        assert len(subject.all(AttemptEnded)) == 1

    async def test_stop_does_not_wait_for_what_never_ends(self, subject: ExecutorSubject) -> None:
        name, _ = await subject.nth(WorkerHello)
        subject.executor.send(name, AttemptBench.start_message("a", agent="hang"))
        await subject.executor.stop(0.1)
        await subject.until(lambda: subject.ended)
        assert subject.all(AttemptEnded) == []
