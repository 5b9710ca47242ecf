"""Payloads of attempts in memory, for both sides of the core."""

from __future__ import annotations

from collections.abc import Sequence

from rollserve.errors import NotFound
from rollserve.records.call import Call
from rollserve.store.payload import AttemptPayload, EndState, SealedPayload
from rollserve.testing.journal import Hook, nothing


class FakePayloads:
    """``rollserve.store.payload.PayloadStore``: ``kept`` by reference, ``live`` and ``left`` by attempt.
    ``unreadable`` ones raise when they are read; ``open_error`` and ``log_error`` are raised by whatever
    begins a segment, or logs. ``before_read``, ``before_seal`` and ``before_salvage`` are awaited first."""

    def __init__(self) -> None:
        self.kept: dict[str, AttemptPayload] = {}
        self.live: dict[str, AttemptPayload] = {}
        self.left: dict[str, AttemptPayload] = {}
        self.unreadable: set[str] = set()
        self.open_error: Exception | None = None
        self.log_error: OSError | None = None
        self.before_read: Hook = nothing
        self.before_seal: Hook = nothing
        self.before_salvage: Hook = nothing
        self.swept: set[str] | None = None

    def keep(self, ref: str, payload: AttemptPayload) -> str:
        self.kept[ref] = payload
        return ref

    def open_segment(self, run_id: str, attempt_id: str) -> FakeSegment:
        if self.open_error is not None:
            raise self.open_error
        return FakeSegment(self, f"{run_id}/{attempt_id}")

    async def read(self, ref: str) -> AttemptPayload:
        await self.before_read()
        if ref in self.unreadable:
            raise OSError(f"{ref}: bad block")
        if ref not in self.kept:
            raise NotFound(f"no payload {ref!r}")
        return self.kept[ref]

    async def read_live(self, run_id: str, attempt_id: str) -> AttemptPayload:
        return self.live.get(f"{run_id}/{attempt_id}", AttemptPayload())

    async def salvage(self, run_id: str, attempt_id: str) -> SealedPayload | None:
        await self.before_salvage()
        ref = f"{run_id}/{attempt_id}"
        for unsealed in (self.live, self.left):
            if ref in unsealed:
                self.keep(ref, unsealed.pop(ref))
        return SealedPayload(ref=ref, size_bytes=1) if ref in self.kept else None

    async def delete(self, refs: Sequence[str]) -> None:
        for ref in refs:
            self.kept.pop(ref, None)

    async def sweep(self, known: set[str]) -> int:
        self.swept = known
        unknown = [ref for ref in self.kept if ref not in known]
        await self.delete(unknown)
        return len(unknown)


class FakeSegment:
    def __init__(self, payloads: FakePayloads, ref: str) -> None:
        self._payloads = payloads
        self._ref = ref
        self._payload = payloads.live.setdefault(ref, AttemptPayload())

    def append_call(self, call: Call) -> None:
        self._payload.calls.append(call)

    def append_log(self, line: str) -> None:
        if self._payloads.log_error is not None:
            raise self._payloads.log_error
        self._payload.log.append((0.0, line))

    def append_artifact(self, path: str, data: bytes) -> None:
        self._payload.artifacts[path] = data

    def append_call_rewards(self, rewards: dict[str, float]) -> None:
        self._payload.call_rewards.update(rewards)

    def append_end(self, end: EndState) -> None:
        self._payload.end = end

    async def seal(self) -> SealedPayload:
        await self._payloads.before_seal()
        self._payloads.live.pop(self._ref, None)
        return SealedPayload(ref=self._payloads.keep(self._ref, self._payload), size_bytes=1)

    def leave(self) -> None:
        if self._ref in self._payloads.live:
            self._payloads.left[self._ref] = self._payloads.live.pop(self._ref)

    def discard(self) -> None:
        self._payloads.live.pop(self._ref, None)
