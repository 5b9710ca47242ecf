"""Task sources: the server keeps a run supplied with groups, as many as are needed and no more.

With a target, a run needs ``target_groups`` informative groups for each version of its policy, from the
one it was opened at (or rewound to) to as many ahead as its staleness rule allows. A group that is
filtered or fails is replaced at once; once the target is met, what is still open is stopped or carried
over. All of it is decided from what the store says now, so a restart takes it up where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from dataclasses import dataclass, field

import msgspec
from pydantic import ValidationError

from rollserve.errors import InvalidInput, NotFound
from rollserve.records.control import TaskSource
from rollserve.records.run import RunSpec, SourceState, SourceStatus
from rollserve.records.task import Task
from rollserve.rollouts.bell import Bell, heard
from rollserve.rollouts.curriculum import Curriculum
from rollserve.rollouts.pictures import Sight
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.runs import RunSpecs
from rollserve.rollouts.stops import GroupEnds
from rollserve.rollouts.taken import Taken
from rollserve.rollouts.tally import Tally
from rollserve.store.task_lines import TaskLines
from rollserve.store.values import Fed, NewGroup, Supply

log = logging.getLogger(__name__)

MAX_INLINE_BYTES = 1 << 20
_STEP = 64
"""Tasks taken in one transaction."""
_LOOK_S = 5.0
_GATHER_S = 0.02


class InlineTasks:
    """``TaskLines`` of a list in the run's settings."""

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        self._lines = [task.model_dump_json().encode() for task in tasks]
        self.lines = len(self._lines)
        self.digest = hashlib.sha256(b"\n".join(self._lines)).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._lines))

    def read(self, index: int) -> tuple[str, bytes]:
        return f"source.tasks.{index}", self._lines[index]


@dataclass(slots=True)
class Reading:
    """A source that is being read; ``barren``: places in a row without a task that can be run."""

    tasks: TaskLines
    epoch: int = -1
    order: list[int] = field(default_factory=list)
    barren: int = 0

    def index(self, place: int, seed: int | None) -> int:
        """Which task stands at a place of the source's order, epoch after epoch."""
        epoch, at = divmod(place, self.tasks.lines)
        if seed is None:
            return at
        if epoch != self.epoch:
            self.order = list(range(self.tasks.lines))
            random.Random(f"{seed}/{epoch}").shuffle(self.order)
            self.epoch = epoch
        return self.order[at]


def needed(source: TaskSource, spec: RunSpec, supply: Supply) -> int | None:
    """Informative groups still missing for the versions that may be worked for; None without a target."""
    if source.target_groups is None:
        return None
    moved = max(0, supply.version - supply.base_version)  # another run's rewind may set it back further
    versions = moved + 1 + (spec.staleness.max_staleness or 0)
    return versions * source.target_groups - supply.good


def room(source: TaskSource, spec: RunSpec, supply: Supply) -> int:
    """How many groups to open now."""
    if supply.undelivered >= spec.quota.max_undelivered_groups:
        return 0
    most = min(source.in_flight, spec.quota.max_queued_groups) - supply.open
    missing = needed(source, spec, supply)
    return most if missing is None else min(most, missing + source.extra_groups - supply.open)


class Sources:
    """``wake`` is rung by whatever may ask for more groups, and here when there are more to start."""

    def __init__(self, ports: Ports, specs: RunSpecs, ends: GroupEnds, tally: Tally, *, wake: Bell) -> None:
        self._store = ports.store
        self._open_tasks = ports.open_tasks
        self._check_task = ports.check_task
        self._specs = specs
        self._ends = ends
        self._tally = tally
        self._wake = wake
        self._reading: dict[str, Reading] = {}
        self._check_function = ports.check_function
        self._curriculum = Curriculum(ports, self._task)
        self._asking: dict[str, asyncio.Task[None]] = {}
        """Curricula that are thinking, by run: no other source waits for them."""

    async def opened(self, spec: RunSpec) -> SourceStatus | None:
        """The source of a run that is about to be opened. Raises ``InvalidInput``."""
        if spec.source is None:
            return None
        if spec.source.curriculum is not None:
            await self._check_function(spec.source.curriculum, "source.curriculum")
        tasks = await self._tasks(spec.source)
        if not tasks.lines and spec.source.curriculum is None:
            raise InvalidInput("there is no task in it", field="source.path")
        if isinstance(tasks, InlineTasks):
            if tasks.size_bytes > MAX_INLINE_BYTES:
                raise InvalidInput(
                    f"at most {MAX_INLINE_BYTES} bytes of JSON",
                    field="source.tasks",
                    hint="use a file (path)",
                )
            sight = Sight(spec.policy, self._store)
            for index, task in enumerate(spec.source.tasks):
                await self._check_task(task, f"source.tasks.{index}")
                await sight.check(task, f"source.tasks.{index}")
        return SourceStatus(state=SourceState.RUNNING, position=0, lines=tasks.lines, digest=tasks.digest)

    async def _tasks(self, source: TaskSource) -> TaskLines:
        if source.path is None:
            return await asyncio.to_thread(InlineTasks, source.tasks)
        return await asyncio.to_thread(self._open_tasks, source.path)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._run()
        finally:
            for task in self._asking.values():
                task.cancel()
            await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _run(self) -> None:
        while True:
            rung = self._wake.listen()
            try:
                runs = await self._store.list_sources()
                for gone in self._reading.keys() - set(runs):
                    del self._reading[gone]
                    self._curriculum.forget(gone)
                for run_id in runs:
                    await self._supply(run_id)
            except Exception:
                log.exception("sources could not be read; again in %g s", _LOOK_S)
                self._tally.add("store_errors")
            await heard(rung, _LOOK_S)
            await asyncio.sleep(_GATHER_S)

    async def _supply(self, run_id: str) -> None:
        try:
            spec, _ = await self._specs.get(run_id)
            supply = await self._store.supply(run_id)
        except NotFound:  # pruned
            return
        source = spec.source
        if source is None:
            return
        missing = needed(source, spec, supply)
        if missing is not None and missing <= 0:
            await self._enough(run_id, source, supply)
        elif supply.source.state is SourceState.RUNNING and (wanted := room(source, spec, supply)) > 0:
            if source.curriculum is not None:
                self._begin_asking(run_id, spec, source, supply.source, min(wanted, _STEP))
                return
            taken = await self._take(run_id, spec, source, supply.source, min(wanted, _STEP))
            await self._feed(run_id, supply.source, taken)
            if wanted > _STEP:
                self._wake.ring()

    def _begin_asking(
        self, run_id: str, spec: RunSpec, source: TaskSource, status: SourceStatus, wanted: int
    ) -> None:
        if run_id not in self._asking:
            asking = self._ask(run_id, spec, source, status, wanted)
            task = self._asking[run_id] = asyncio.create_task(asking, name=f"curriculum {run_id}")
            task.add_done_callback(lambda _: self._asking.pop(run_id, None))

    async def _ask(
        self, run_id: str, spec: RunSpec, source: TaskSource, status: SourceStatus, wanted: int
    ) -> None:
        """What it gives is fed only if the source is still where it was."""
        try:
            tasks = (await self._reader(run_id, source, status)).tasks
            taken = await self._curriculum.take(run_id, spec, source, status, tasks, wanted)
        except InvalidInput as error:
            taken = Taken(next=status.position, state=SourceState.FAILED, detail=error.message)
        try:
            if taken.groups or taken.broken or taken.state is not SourceState.RUNNING:
                await self._feed(run_id, status, taken)
        except Exception:  # an edge: the loop looks again by itself
            log.exception("a curriculum's tasks could not be stored")
            self._tally.add("store_errors")

    async def _enough(self, run_id: str, source: TaskSource, supply: Supply) -> None:
        if not supply.open:
            return
        if source.carry_over:
            self._tally.add("groups_carried", await self._store.carry_source_groups(run_id))
            return
        stopped = await self._store.stop_source_groups(run_id)
        if stopped.left:
            self._tally.add("groups_stopped", stopped.left)
            self._ends.tell(stopped, run_id)

    async def _feed(self, run_id: str, status: SourceStatus, taken: Taken) -> None:
        fed = Fed(
            position=status.position,
            next=taken.next,
            groups=taken.groups,
            broken=taken.broken,
            state=taken.state,
            detail=taken.detail or status.detail,
        )
        if await self._store.feed(run_id, fed):
            self._tally.add("groups_submitted", len(taken.groups))
            if taken.state is not SourceState.RUNNING:
                self._ends.unknown(run_id)
            self._wake.ring()

    async def _take(
        self, run_id: str, spec: RunSpec, source: TaskSource, status: SourceStatus, wanted: int
    ) -> Taken:
        taken = Taken(next=status.position)
        try:
            reading = await self._reader(run_id, source, status)
        except InvalidInput as error:
            taken.state, taken.detail = SourceState.FAILED, error.message
            return taken
        end = None if source.epochs is None else source.epochs * status.lines
        while taken.state is SourceState.RUNNING and len(taken.groups) < wanted:
            if taken.next - status.position >= 16 * _STEP:
                break
            if end is not None and taken.next >= end:
                taken.state = SourceState.ENDED
            else:
                await self._take_one(reading, spec, source, taken)
        return taken

    async def _reader(self, run_id: str, source: TaskSource, status: SourceStatus) -> Reading:
        known = self._reading.get(run_id)
        if known is None:
            tasks = await self._tasks(source)
            if tasks.digest != status.digest:
                raise InvalidInput("the file has changed since the run was opened", field="source.path")
            known = self._reading[run_id] = Reading(tasks)
        return known

    async def _take_one(self, reading: Reading, spec: RunSpec, source: TaskSource, taken: Taken) -> None:
        place = taken.next
        index = reading.index(place, source.shuffle_seed)
        try:
            task = await self._task(reading.tasks, index, spec.policy)
        except InvalidInput as error:
            self._broken(reading, source, taken, error.message)
            return
        reading.barren = 0
        taken.next = place + 1
        taken.groups.append(
            NewGroup(task=task, num_rollouts=source.num_rollouts, rule=spec.groups, source_seq=place)
        )

    def _broken(self, reading: Reading, source: TaskSource, taken: Taken, what: str) -> None:
        taken.detail = what
        if source.on_broken_line == "fail":
            taken.state = SourceState.FAILED
            return
        taken.next += 1
        taken.broken.append(what)
        reading.barren += 1
        if reading.barren >= reading.tasks.lines:
            taken.state = SourceState.FAILED
            taken.detail = f"no line is a task that can be run; the last one: {what}"

    async def _task(self, tasks: TaskLines, index: int, policy: str) -> Task:
        """Raises ``InvalidInput`` that says where."""
        where, line = await asyncio.to_thread(tasks.read, index)
        try:
            task = await asyncio.to_thread(Task.model_validate_json, line)
            await self._check_task(task, "")
            await Sight(policy, self._store).check(task, "")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field_name = ".".join(str(part) for part in first["loc"])
            message = f"{where}: {field_name + ': ' if field_name else ''}{first['msg']}"
            raise InvalidInput(message, field="source") from error
        except (InvalidInput, msgspec.MsgspecError) as error:
            raise InvalidInput(f"{where}: {error}", field="source") from error
        return task
