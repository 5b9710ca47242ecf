"""Sandboxes made before they are asked for, per image: what a start costs is paid while nobody waits.

What a sandbox is started from is its spec without files and environment; those come when it is adopted, in
a fraction of a millisecond. A spare was never used, so there is nothing to reset, and none is used twice.

The target of each kind is the most that were asked for within one second of the last minute: groups ask in
bursts, and a burst is what has to be met. All kinds together have at most ``most``; where that is not enough
the kind asked for last goes first. Spares are made one at a time, and none while somebody waits for a start
of the worker's own: what is asked for goes first. What is over the target is closed within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from rollserve.errors import RollserveError
from rollserve.rollouts.clock import Cancellable, Clock, Deadline
from rollserve.sandbox.base import RuntimeReport, Sandbox, SandboxSpec, Spare, SpareMaker

logger = logging.getLogger(__name__)

WINDOW_S = 60.0
BURST_S = 1.0
TRIM_EVERY_S = 5.0
SPARE_TTL_S = 24 * 3600.0
MAKE_WITHIN_S = 60.0
RETRY_S = 10.0
CLOSE_S = 15.0


@dataclass
class _Kind:
    """Of one spec without files and environment. ``asked`` are the moments it was asked for, oldest first."""

    spec: SandboxSpec
    asked: deque[float] = field(default_factory=deque)
    spares: deque[Spare] = field(default_factory=deque)
    not_before: float = 0.0

    def target(self, now: float) -> int:
        while self.asked and self.asked[0] <= now - WINDOW_S:
            self.asked.popleft()
        most, recent = 0, deque[float]()
        for moment in self.asked:
            recent.append(moment)
            while recent[0] <= moment - BURST_S:
                recent.popleft()
            most = max(most, len(recent))
        return most


class WarmRuntime:
    """Implements ``Runtime`` over one whose sandboxes can be made ahead. ``close`` closes that one too."""

    def __init__(self, runtime: SpareMaker, *, most: int, clock: Clock) -> None:
        self._runtime = runtime
        self._most = most
        self._clock = clock
        self._kinds: dict[bytes, _Kind] = {}
        self._counts: Counter[str] = Counter()
        self._starting = 0
        self._wake = asyncio.Event()
        self._maker: asyncio.Task[None] | None = None
        self._alarm: Cancellable | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def name(self) -> str:
        return self._runtime.name

    def report(self) -> RuntimeReport:
        return self._runtime.report()

    def check_image(self, image: str) -> None:
        self._runtime.check_image(image)

    async def reap(self) -> int:
        return await self._runtime.reap()

    def counters(self) -> dict[str, float]:
        """``warm_starts``, ``cold_starts`` and ``spares_made`` so far."""
        return {name: float(self._counts[name]) for name in ("warm_starts", "cold_starts", "spares_made")}

    @property
    def spares(self) -> int:
        return sum(len(kind.spares) for kind in self._kinds.values())

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> Sandbox:
        kind = self._asked(spec)
        while kind is not None and kind.spares:
            spare = kind.spares.popleft()
            try:
                await spare.adopt(spec, ttl_s=ttl_s)
            except RollserveError as error:  # it died meanwhile, or won't take these files: a fresh one tells
                logger.info("spare %s can't be taken: %s", spare.id, error)
                self._drop(spare)
                continue
            self._counts["warm_starts"] += 1
            return spare
        self._counts["cold_starts"] += 1
        self._starting += 1
        try:
            return await self._runtime.create(spec, owner=owner, ttl_s=ttl_s)
        finally:
            self._starting -= 1
            self._wake.set()

    async def close(self) -> None:
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        if self._maker is not None:
            self._maker.cancel()
            await asyncio.gather(self._maker, return_exceptions=True)
        for kind in self._kinds.values():
            while kind.spares:
                self._drop(kind.spares.popleft())
        while self._closing:
            await asyncio.wait(set(self._closing))
        await self._runtime.close()

    # -- demand -------------------------------------------------------------------------------

    def _asked(self, spec: SandboxSpec) -> _Kind | None:
        """None for what can't be made ahead: a socket is one attempt's, and so is a snapshot."""
        if self._most == 0 or spec.sockets or spec.snapshot or self._closed:
            return None
        plain = msgspec.structs.replace(spec, files={}, env={})
        key = msgspec.msgpack.encode(plain)
        kind = self._kinds.pop(key, None) or _Kind(plain)
        self._kinds[key] = kind  # the last one asked for comes last
        kind.asked.append(self._clock.monotonic())
        if self._maker is None:
            self._maker = asyncio.create_task(self._make_spares(), name="spare-sandboxes")
        if self._alarm is None:
            self._alarm = self._clock.call_later(TRIM_EVERY_S, self._trim)
        self._wake.set()
        return kind

    def _targets(self) -> Iterator[tuple[_Kind, int]]:
        """What each kind should have, those asked for last first, all together ``most``."""
        left, now = self._most, self._clock.monotonic()
        for kind in reversed(list(self._kinds.values())):
            target = min(left, kind.target(now))
            left -= target
            yield kind, target

    # -- supply -------------------------------------------------------------------------------

    async def _make_spares(self) -> None:
        while True:
            kind = self._wanted()
            if kind is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                async with Deadline(self._clock, MAKE_WITHIN_S):
                    spare = await self._runtime.create_spare(kind.spec, ttl_s=SPARE_TTL_S)
            except Exception as error:  # an edge: whoever asks next is told by a start of its own
                logger.info("no spare sandbox: %s: %s", type(error).__name__, error)
                kind.not_before = self._clock.monotonic() + RETRY_S
                continue
            self._counts["spares_made"] += 1
            kind.spares.append(spare)

    def _wanted(self) -> _Kind | None:
        """Nothing while somebody waits for a start."""
        if self._starting:
            return None
        now = self._clock.monotonic()
        for kind, target in self._targets():
            if len(kind.spares) < target and kind.not_before <= now:
                return kind
        return None

    def _trim(self) -> None:
        """Close what is over the targets, forget what nobody asks for, and look again while there is any."""
        self._alarm = None
        for kind, target in list(self._targets()):
            while len(kind.spares) > target:
                self._drop(kind.spares.popleft())
        self._kinds = {key: kind for key, kind in self._kinds.items() if kind.asked or kind.spares}
        if self._kinds:
            self._alarm = self._clock.call_later(TRIM_EVERY_S, self._trim)
            self._wake.set()

    def _drop(self, spare: Spare) -> None:
        task = asyncio.create_task(self._end(spare), name=f"drop-{spare.id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, spare: Spare) -> None:
        try:
            async with Deadline(self._clock, CLOSE_S):
                await spare.close()
        except Exception:  # an edge: nobody waits for it; the runtime's own close tries it once more
            logger.exception("spare sandbox %s did not close", spare.id)
