"""What works behind the API: rollouts are started, watched and ended, groups end and are judged, and sources
give more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollserve.rollouts.bell import Bell, Bells
from rollserve.rollouts.board import Board
from rollserve.rollouts.checkups import Checkups
from rollserve.rollouts.deadlines import Deadlines
from rollserve.rollouts.endings import Endings
from rollserve.rollouts.filters import Judge
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.regrades import Regrades
from rollserve.rollouts.runs import RunSpecs
from rollserve.rollouts.scheduler import Scheduler
from rollserve.rollouts.sources import Sources
from rollserve.rollouts.stops import GroupEnds, Stops
from rollserve.rollouts.tally import Tally


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What most parts of the server have in common. ``wake`` rings when something may be started,
    ``happened`` when there are events, ``finished`` when a run's log has grown."""

    ports: Ports
    specs: RunSpecs
    tally: Tally = field(default_factory=Tally)
    board: Board = field(default_factory=Board)
    fleet: Fleet = field(default_factory=Fleet)
    wake: Bell = field(default_factory=Bell)
    happened: Bell = field(default_factory=Bell)
    finished: Bells = field(default_factory=Bells)


class Machinery:
    def __init__(self, shared: Shared, policies: Policies) -> None:
        ports, specs, tally = shared.ports, shared.specs, shared.tally
        board, fleet = shared.board, shared.fleet
        wake, happened = shared.wake, shared.happened
        judging, dated = Bell(), Bell()
        self.checkups = Checkups(ports, policies, fleet)
        self.stops = Stops(ports, board)
        self.ends = GroupEnds(
            self.stops,
            tally,
            finished=shared.finished,
            judging=judging,
            dated=dated,
            freed=wake,
            happened=happened,
        )
        self._deadlines = Deadlines(ports, self.ends, tally, dated=dated)
        self._judge = Judge(ports, specs, self.ends, tally, judging=judging)
        self.sources = Sources(ports, specs, self.ends, tally, wake=wake)
        endings = Endings(ports, specs, board, fleet, self.ends, tally, freed=wake, happened=happened)
        self.regrades = Regrades(ports, specs, policies, fleet, tally, happened=happened)
        self.scheduler = Scheduler(
            ports,
            specs,
            board,
            fleet,
            endings,
            self.stops,
            self.regrades,
            tally,
            wake=wake,
            dated=dated,
            on_backend=self.checkups.report,
        )

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Its loops, which run until they are cancelled."""
        tasks.create_task(self.scheduler.run(), name="scheduler")
        tasks.create_task(self.checkups.run(), name="checkups")
        tasks.create_task(self._deadlines.run(), name="deadlines")
        tasks.create_task(self._judge.run(), name="filters")
        tasks.create_task(self.sources.run(), name="sources")
        tasks.create_task(self.regrades.run(), name="regrades")
