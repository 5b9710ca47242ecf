"""What runs in the next step. No thread, no clock, no HTTP: call ``step`` until it has nothing to do.

A step finishes what waits for a drain, admits waiting requests (their prompts run and give their first
token) and samples one token for each running one. Pausing, aborting and swapping weights happen between
steps, so every token has exactly one weight version.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rollserve.errors import Conflict, QueueFull
from rollserve.localserver.request import Mode
from rollserve.localserver.sampler import sample
from rollserve.localserver.sequence import Progress, Sequence

_NOT_A_NUMBER = "the model gave logits that are not numbers"


class Model(Protocol):
    """What the engine needs of ``model.BatchModel``."""

    max_batch: int

    def prefill(self, first: int, prompts: Seq[Seq[int]]) -> Tensor: ...
    def score(self, slot: int, prompt: Seq[int]) -> list[float]: ...
    def decode(self, last_ids: Seq[int], lengths: Seq[int]) -> Tensor: ...
    def move(self, source: int, target: int, length: int) -> None: ...


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    steps: int = 0
    weight_updates: int = 0


class Engine:
    """Continuous batching over one model.

    ``max_waiting`` bounds the queue; ``prefill_tokens`` bounds the (padded) prompt tokens of one step,
    so that running requests are not held up long by new ones.
    """

    def __init__(
        self,
        model: Model,
        *,
        weight_version: str = "default",
        max_waiting: int = 4096,
        prefill_tokens: int = 8192,
    ) -> None:
        self.model = model
        self.weight_version = weight_version
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.paused = False
        self.counters = Counters()
        self._frozen = False
        self._drained: deque[Callable[[], None]] = deque()
        self._max_waiting = max_waiting
        self._prefill_tokens = prefill_tokens
        self._reported: list[Progress] = []

    # ── requests

    def submit(self, sequence: Sequence) -> None:
        if len(self.waiting) >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} requests are waiting already", retry_after_s=1.0)
        self.waiting.append(sequence)

    def abort(self, wanted: Callable[[Sequence], bool], failure: str | None = None) -> list[Sequence]:
        """End the sequences that ``wanted`` names, with what they have sampled so far."""
        found = [s for s in (*self.running, *self.waiting) if wanted(s)]
        for sequence in found:
            sequence.abort(failure)
            self._report(sequence, len(sequence.token_ids))
        self.waiting = deque(s for s in self.waiting if not s.done)
        self._compact()
        return found

    # ── control

    def pause(self, mode: Mode) -> Future[None]:
        """Admit nothing more; the future ends once the pause is in force.

        *keep* freezes what runs, *wait* lets it end first, *abort* ends it at once.
        """
        self.paused = True
        self._frozen = mode == "keep"
        return self._settle(mode, lambda: None)

    def resume(self) -> None:
        self.paused = self._frozen = False

    def update_weights(self, load: Callable[[], None], version: str, mode: Mode) -> Future[None]:
        """Call ``load`` and set the version, between two steps; the future ends, or fails, with it.

        *keep* does so at once, and what runs goes on upon keys and values of the old weights; *wait*
        does so when all that runs has ended, *abort* ends it at once. An error of ``load`` leaves the
        version as it was.
        """

        def swap() -> None:
            load()
            self.weight_version = version
            self.counters.weight_updates += 1

        if mode == "wait" and self._frozen and self.running:
            raise Conflict(
                "requests are frozen by a pause and will not end", field="mode", hint="use keep or abort"
            )
        return self._settle(mode, swap)

    def _settle(self, mode: Mode, action: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        if mode == "abort":
            self.abort(lambda sequence: True)
        if mode == "wait" and self.running:
            self._drained.append(lambda: _settle_into(done, action))
        else:
            _settle_into(done, action)
        return done

    # ── stepping

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        if self._reported or (self.running and not self._frozen):
            return True
        return bool(self._drained and not self.running) or self._admits

    @property
    def _admits(self) -> bool:
        return bool(self.waiting) and not self.paused and not self._drained and self._free > 0

    @property
    def _free(self) -> int:
        return self.model.max_batch - len(self.running)

    def step(self) -> list[Progress]:
        """One step; what has been sampled or has ended since the last one."""
        if self.running and not self._frozen:
            self._decode()
        while self._drained and not self.running:
            self._drained.popleft()()
        if self._admits:
            self._admit()
        self.counters.steps += 1
        return self.take_reported()

    def take_reported(self) -> list[Progress]:
        reported, self._reported = self._reported, []
        return reported

    def _decode(self) -> None:
        lasts = [sequence.last_id for sequence in self.running]
        self._take(self.running, self.model.decode(lasts, [sequence.length for sequence in self.running]))
        self._compact()

    def _admit(self) -> None:
        first = len(self.running)
        admitted = self._next_prompts()
        self.running.extend(admitted)
        self.counters.prompt_tokens += sum(len(sequence.prompt_ids) for sequence in admitted)
        for slot, sequence in enumerate(admitted, first):
            if sequence.params.prompt_logprobs is not None:
                sequence.prompt_logprobs = self.model.score(slot, sequence.prompt_ids)
        self._take(admitted, self.model.prefill(first, [sequence.prompt_ids for sequence in admitted]))
        self._compact()

    def _next_prompts(self) -> list[Sequence]:
        """The next waiting ones, at least one, whose padded prompts fit one step."""
        admitted: list[Sequence] = []
        longest = 0
        while self.waiting and len(admitted) < self._free:
            longest = max(longest, len(self.waiting[0].prompt_ids))
            if admitted and longest * (len(admitted) + 1) > self._prefill_tokens:
                break
            admitted.append(self.waiting.popleft())
        return admitted

    def _take(self, sequences: Seq[Sequence], logits: Tensor) -> None:
        for sequence, (token_id, logprob, rank) in zip(sequences, sample(logits, sequences), strict=True):
            start = len(sequence.token_ids)
            if math.isnan(logprob):
                sequence.abort(_NOT_A_NUMBER)
            else:
                sequence.append(token_id, logprob, rank, self.weight_version)
                self.counters.generated_tokens += 1
            if sequence.streamed or sequence.done:
                self._report(sequence, start)

    def _report(self, sequence: Sequence, start: int) -> None:
        self._reported.append(Progress.since(sequence, start if sequence.streamed else 0))
        if sequence.done:
            self.counters.finished += 1
            self.counters.aborted += sequence.finish_reason == "abort"

    def _compact(self) -> None:
        """Refill the slots of ended sequences from the end, so that the batch fills ``0:n``."""
        slot = 0
        while slot < len(self.running):
            if not self.running[slot].done:
                slot += 1
                continue
            last = self.running.pop()
            if slot < len(self.running):
                self.running[slot] = last
                if not last.done:
                    self.model.move(len(self.running), slot, last.length)


def _settle_into(done: Future[None], action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # the caller's edge: it gets what was raised
        done.set_exception(error)
    else:
        done.set_result(None)
