"""The stages of a worker: separately sized pools for init, run and grade, and the ready buffer.

Making sandboxes, driving agents and grading load a machine in different ways, so each has its own
bound. The ready buffer keeps sandboxes made ahead of the run slots; it is bounded *before* init: an
init starts only if its sandbox has somewhere to go, so that no init slot ever holds a finished one.
That is the invariant ``init + ready <= ready_slots + free run slots``: run slots are filled from the
buffer alone, so both sides fall together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rollserve.records.rollout import Stage
from rollserve.turns import Turns


@dataclass(frozen=True, kw_only=True)
class StageSlots:
    """``init``, ``run``, ``grade`` at least 1; ``ready`` 0 makes nothing ahead."""

    init: int = 8
    ready: int = 16
    run: int = 64
    grade: int = 16

    @property
    def capacity(self) -> int:
        """Attempts a worker holds at once, over all stages."""
        return self.init + self.ready + self.run + self.grade

    def as_dict(self) -> dict[str, int]:
        return {"init": self.init, "ready": self.ready, "run": self.run, "grade": self.grade}


class _Gate:
    """A FIFO of waiters; the pools say when the next may pass."""

    def __init__(self, is_open: Callable[[], bool], enter: Callable[[], None]) -> None:
        self._is_open = is_open
        self._enter = enter
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return sum(not waiter.done() for waiter in self._waiters)

    async def wait(self, give_back: Callable[[], None]) -> None:
        """Returns inside. Cancelled: outside, with nothing held."""
        if not self._waiters and self._is_open():
            self._enter()
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._forget(waiter)
            else:
                give_back()
            raise

    def _forget(self, waiter: asyncio.Future[None]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        self.let_in()

    def let_in(self) -> None:
        while self._waiters and (self._waiters[0].done() or self._is_open()):
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._enter()
                waiter.set_result(None)


class StagePools:
    """All places of one worker. An attempt moves through them with a ``Place``."""

    def __init__(self, slots: StageSlots) -> None:
        self.slots = slots
        self.turns = Turns()
        """Attempts that enter a stage together go on one after another."""
        self._held = dict.fromkeys((Stage.INIT, Stage.READY, Stage.RUN, Stage.GRADE), 0)
        self._to_init = _Gate(self._init_open, lambda: self._take(Stage.INIT))
        self._to_run = _Gate(self._run_open, self._ready_to_run)
        self._to_grade = _Gate(self._grade_open, lambda: self._take(Stage.GRADE))

    def place(self) -> Place:
        return Place(self)

    def occupancy(self) -> dict[str, int]:
        """Attempts by stage; ``queued`` wait for init, ``grade_wait`` for a grade slot."""
        held = {stage.value: count for stage, count in self._held.items()}
        return {"queued": len(self._to_init), **held, "grade_wait": len(self._to_grade)}

    # -- for Place
    async def enter_init(self) -> None:
        await self._to_init.wait(lambda: self.give_back(Stage.INIT))

    def move_to_ready(self) -> None:
        self._held[Stage.INIT] -= 1
        self._held[Stage.READY] += 1
        self._let_in()

    async def enter_run(self) -> None:
        await self._to_run.wait(self._back_to_ready)

    async def enter_grade(self) -> None:
        await self._to_grade.wait(lambda: self.give_back(Stage.GRADE))

    def give_back(self, stage: Stage) -> None:
        self._held[stage] -= 1
        self._let_in()

    # -- rules
    def _init_open(self) -> bool:
        ahead = self._held[Stage.INIT] + self._held[Stage.READY]
        free_run = self.slots.run - self._held[Stage.RUN]
        return self._held[Stage.INIT] < self.slots.init and ahead < self.slots.ready + free_run

    def _run_open(self) -> bool:
        return self._held[Stage.RUN] < self.slots.run

    def _grade_open(self) -> bool:
        return self._held[Stage.GRADE] < self.slots.grade

    def _take(self, stage: Stage) -> None:
        self._held[stage] += 1

    def _ready_to_run(self) -> None:
        self._held[Stage.READY] -= 1
        self._held[Stage.RUN] += 1

    def _back_to_ready(self) -> None:
        self._held[Stage.RUN] -= 1
        self._held[Stage.READY] += 1
        self._let_in()

    def _let_in(self) -> None:
        self._to_run.let_in()
        self._to_init.let_in()
        self._to_grade.let_in()


class Place:
    """Where one attempt is. Each wait is first come, first served; one that is cancelled takes
    nothing."""

    def __init__(self, pools: StagePools) -> None:
        self._pools = pools
        self.stage: Stage | None = None

    async def to_init(self) -> None:
        await self._pools.enter_init()
        self.stage = Stage.INIT

    def to_ready(self) -> None:
        self._pools.move_to_ready()
        self.stage = Stage.READY

    async def to_run(self) -> None:
        """Cancelled, it is still in the ready buffer: its sandbox is."""
        await self._pools.enter_run()
        self.stage = Stage.RUN

    async def to_grade(self) -> None:
        await self._pools.enter_grade()
        self.stage = Stage.GRADE

    def detach(self) -> Callable[[], None]:
        """Hold nothing any more; what is returned gives back what was held, for somebody else to call."""
        held = Place(self._pools)
        held.stage, self.stage = self.stage, None
        return held.release

    def release(self) -> None:
        """Give back what is held. Idempotent."""
        stage, self.stage = self.stage, None
        if stage is not None:
            self._pools.give_back(stage)
