"""``rollserve submit --wait``: what becomes of the groups, and why it takes so long."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from itertools import islice

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rollserve.cli.obstacles import Obstacle, in_the_way
from rollserve.cli.output import err, first_line
from rollserve.client import Client, RunHandle
from rollserve.errors import FailureKind, Unavailable
from rollserve.records.rollout import GroupState, Rollout, RolloutState, Stop

TRAINER = "rollserve-cli"
LOOK_EVERY_S = 2.0
AGAIN_AFTER_LOOKS = 15
"""What is in the way is said again then, where no progress is shown."""
LOOKED_AT = 20
"""Groups asked for by name at each look: those that are never handed over (filtered, cancelled, taken by
another who waits) are found among them, sooner or later."""
SHOWN_CHARS = 300

Reason = tuple[str, str, str]
"""Of a failure: kind, code, the message's first line."""

_GOING_ON = (GroupState.OPEN, GroupState.JUDGING, GroupState.HELD)


class Results:
    """Rewards by group id, and the reasons why there is none, with one rollout for each."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.missing = dict.fromkeys(ids)
        self.complete = asyncio.Event()
        self.rewards: dict[str, list[float | None]] = {}
        self.reasons: Counter[Reason] = Counter()
        self.examples: dict[Reason, str] = {}

    def add(self, group_id: str, rollouts: Sequence[Rollout]) -> None:
        """Rollouts that were only spare are neither failed nor cancelled."""
        if group_id not in self.missing:
            return
        del self.missing[group_id]
        self.rewards[group_id] = [rollout.reward for rollout in rollouts]
        for rollout in rollouts:
            if rollout.reward is None and not (rollout.failure and rollout.failure.code == Stop.REDUNDANT):
                reason = _reason(rollout)
                self.reasons[reason] += 1
                self.examples.setdefault(reason, rollout.id)
        if not self.missing:
            self.complete.set()

    @property
    def cancelled(self) -> int:
        kinds = (kind for kind, _, _ in self.reasons.elements())
        return sum(kind == FailureKind.CANCELLED for kind in kinds)

    @property
    def failed(self) -> int:
        return self.reasons.total() - self.cancelled


def _reason(rollout: Rollout) -> Reason:
    failure = rollout.failure
    if failure is None:
        cancelled = rollout.state is RolloutState.CANCELLED
        return ("cancelled" if cancelled else rollout.state.value, "", "no reward")
    return failure.kind.value, failure.code, first_line(failure.message)[:SHOWN_CHARS]


class Teller:
    """Says what is in the way: at once, then in the progress, and now and then as a line."""

    def __init__(self, progress: Progress, bar: TaskID) -> None:
        self._progress = progress
        self._bar = bar
        self._said: list[Obstacle] = []
        self._looks = 0

    def tell(self, found: list[Obstacle]) -> None:
        self._looks += 1
        silent = not self._progress.live.is_started or not err.is_terminal
        again = silent and self._looks >= AGAIN_AFTER_LOOKS
        for each in found if again else [each for each in found if each not in self._said]:
            self._looks = 0
            err.print(str(each), style="yellow", markup=False, soft_wrap=True)
        if self._said and not found:
            err.print("nothing is in the way any more", style="yellow")
        self._said = found
        worst = next((each for each in found if each.stops), None)
        self._progress.update(self._bar, note=worst.what if worst else "")


async def wait_for(client: Client, handle: RunHandle, ids: Sequence[str], *, quiet: bool) -> Results:
    """Until all groups have ended, in whatever way. ``handle`` collects and may be of a patient client,
    ``client`` looks and says soon what is wrong. Cancelled, it gives back what it has leased."""
    results = Results(ids)
    columns = (
        *(TextColumn("groups"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TextColumn("{task.fields[note]}", style="yellow", markup=False),
    )
    with Progress(*columns, console=err, disable=quiet) as progress:
        bar = progress.add_task("groups", total=len(ids), note="")
        collecting = asyncio.create_task(_collect(handle, results))
        others = [
            asyncio.create_task(_watch(client, handle, results, Teller(progress, bar))),
            asyncio.create_task(_advance(results, progress, bar)),
        ]
        try:
            await _first(collecting, asyncio.create_task(results.complete.wait()))
            for group_id in list(results.missing):  # the run is over: nothing will be handed over
                await _look_up(client, group_id, results)
            progress.update(bar, completed=len(results.rewards), note="")
        finally:
            for task in (collecting, *others):
                task.cancel()
            await asyncio.gather(collecting, *others, return_exceptions=True)
    return results


async def _first(collecting: asyncio.Task[None], complete: asyncio.Task[bool]) -> None:
    """Raises what ``collecting`` did."""
    try:
        await asyncio.wait({collecting, complete}, return_when=asyncio.FIRST_COMPLETED)
        if collecting.done():
            collecting.result()
    finally:
        complete.cancel()
        await asyncio.gather(complete, return_exceptions=True)


async def _advance(results: Results, progress: Progress, bar: TaskID) -> None:
    while True:
        progress.update(bar, completed=len(results.rewards))
        await asyncio.sleep(0.2)


async def _collect(handle: RunHandle, results: Results) -> None:
    """What is handed over, until it is all there or the run is closed."""
    async with aclosing(handle.groups(trainer=TRAINER, auto_ack=False)) as stream:
        async for group in stream:
            await group.ack()
            results.add(group.group.id, [finished.rollout for finished in group.rollouts])
            if not results.missing:
                return


async def _watch(client: Client, handle: RunHandle, results: Results, teller: Teller) -> None:
    ended: set[str] = set()
    while True:
        try:
            teller.tell(await in_the_way(client, (await client.run(handle.id)).run))
            ended = await _look_at_groups(client, results, ended)
        except Unavailable as error:
            teller.tell([Obstacle(error.message, "trying again")])
        await asyncio.sleep(LOOK_EVERY_S)


async def _look_at_groups(client: Client, results: Results, before: set[str]) -> set[str]:
    """Groups that have ended; those of ``before``, which still were not handed over, are looked up."""
    ended = set()
    for group_id in list(islice(results.missing, LOOKED_AT)):
        if (await client.group(group_id)).group.state not in _GOING_ON:
            ended.add(group_id)
    for group_id in ended & before:
        await _look_up(client, group_id, results)
    return ended


async def _look_up(client: Client, group_id: str, results: Results) -> None:
    results.add(group_id, [rollout async for rollout in client.rollouts(group_id=group_id)])
