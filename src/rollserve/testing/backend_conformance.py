"""What any inference backend must do. Subclass it in a test module and give it a ``subject``::

    class TestMine(BackendConformance):
        @pytest.fixture
        async def subject(self) -> AsyncIterator[Subject]:
            yield Subject(backend=MyBackend(url), model="m", prompt_ids=[1, 2, 3])

Greedy sampling must be deterministic, and a generation of ``long_tokens`` must take long enough to be
stopped while it runs.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from rollserve.backend.base import Backend, GenerateRequest, Generation, TokenSink
from rollserve.errors import ContextTooLong
from rollserve.records.call import SamplingParams

DEADLINE_S = 30.0


@dataclass(kw_only=True)
class Subject:
    """``running`` tells how many generations the server works on, where it can be known. ``overlong``
    is the length of a prompt that does not fit. ``aborts_by_id``: an abort returns what was sampled
    (otherwise perhaps nothing)."""

    backend: Backend
    model: str
    prompt_ids: list[int] = field(default_factory=lambda: [1, 5, 9, 13])
    overlong: int = 0
    long_tokens: int = 200
    running: Callable[[], Awaitable[int]] | None = None
    reports_prompt: bool = True

    def request(self, **sampling: Any) -> GenerateRequest:
        """``stop`` never comes early: greedy, and no more than ``max_tokens``."""
        given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, **sampling}
        return GenerateRequest(
            request_id=f"conformance-{uuid.uuid4().hex}",
            model=self.model,
            token_ids=list(self.prompt_ids),
            sampling=SamplingParams(**given),
        )

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        async with asyncio.timeout(DEADLINE_S):
            return await self.backend.generate(request, on_tokens)

    def start(self, request: GenerateRequest) -> tuple[asyncio.Task[Generation], asyncio.Event]:
        """A streamed generation, and an event that is set at its first token."""
        first = asyncio.Event()
        task = asyncio.create_task(self.backend.generate(request, lambda ids, logprobs: first.set()))
        return task, first


class BackendConformance:
    """The suite."""

    async def test_probe_says_what_it_is(self, subject: Subject) -> None:
        info = await subject.backend.probe()
        assert subject.model in info.models
        assert info.engine
        assert info.logprobs_mode in ("processed", "raw", "unknown")
        assert info.context_tokens is None or info.context_tokens > 0

    async def test_every_sampled_id_has_a_logprob(self, subject: Subject) -> None:
        made = await subject.generate(subject.request(temperature=1.0))
        assert 0 < len(made.token_ids) <= 8
        assert len(made.logprobs) == len(made.token_ids)
        assert all(math.isfinite(value) and value <= 1e-4 for value in made.logprobs)
        assert made.finish_reason in ("stop", "length")

    async def test_max_tokens_is_a_length_stop(self, subject: Subject) -> None:
        made = await subject.generate(subject.request(max_tokens=2))
        assert len(made.token_ids) == 2
        assert made.finish_reason == "length"

    async def test_greedy_is_deterministic(self, subject: Subject) -> None:
        first = await subject.generate(subject.request())
        again = await subject.generate(subject.request())
        assert first.token_ids == again.token_ids

    async def test_stop_token_is_kept(self, subject: Subject) -> None:
        free = await subject.generate(subject.request())
        stop = free.token_ids[2]
        made = await subject.generate(subject.request(stop_token_ids=(stop,)))
        assert made.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        assert made.finish_reason == "stop"

    async def test_says_the_prompt_it_consumed(self, subject: Subject) -> None:
        made = await subject.generate(subject.request())
        if subject.reports_prompt:
            assert made.prompt_ids == subject.prompt_ids
        else:
            assert made.prompt_ids is None

    async def test_labels_cover_what_was_sampled(self, subject: Subject) -> None:
        info = await subject.backend.probe()
        made = await subject.generate(subject.request())
        if not info.reports_versions:
            assert made.labels is None
            return
        assert made.labels
        assert made.labels[0].start == 0
        assert made.labels[-1].end == len(made.token_ids)
        for before, after in zip(made.labels, made.labels[1:], strict=False):
            assert before.end == after.start

    async def test_streamed_tokens_are_those_of_the_result(self, subject: Subject) -> None:
        ids: list[int] = []
        logprobs: list[float] = []

        def sink(new_ids: list[int], new_logprobs: list[float]) -> None:
            ids.extend(new_ids)
            logprobs.extend(new_logprobs)

        streamed = await subject.generate(subject.request(), sink)
        whole = await subject.generate(subject.request())
        assert streamed.token_ids == whole.token_ids == ids
        assert streamed.logprobs == logprobs
        assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        assert streamed.labels == whole.labels
        assert streamed.prompt_ids == whole.prompt_ids
        assert streamed.finish_reason == whole.finish_reason

    async def test_prompt_beyond_the_context(self, subject: Subject) -> None:
        if not subject.overlong:
            pytest.skip("the subject names no overlong prompt")
        ids = [1 + at % 7 for at in range(subject.overlong)]
        request = msgspec.structs.replace(subject.request(), token_ids=ids)
        with pytest.raises(ContextTooLong):
            await subject.generate(request)

    async def test_many_at_once_are_not_mixed_up(self, subject: Subject) -> None:
        prompts = [[1 + at, 2, 3] for at in range(8)]
        requests = [msgspec.structs.replace(subject.request(), token_ids=ids) for ids in prompts]
        alone = [(await subject.generate(request)).token_ids for request in requests]
        again = [msgspec.structs.replace(r, request_id=f"{r.request_id}-b") for r in requests]
        together = await asyncio.gather(*(subject.generate(request) for request in again))
        assert [made.token_ids for made in together] == alone

    async def test_abort_ends_it_with_what_it_had(self, subject: Subject) -> None:
        request = subject.request(max_tokens=subject.long_tokens)
        task, first = subject.start(request)
        async with asyncio.timeout(DEADLINE_S):
            await first.wait()
            await subject.backend.abort([request.request_id])
            made = await task
        assert made.finish_reason == "abort"
        assert 0 < len(made.token_ids) < subject.long_tokens
        assert len(made.logprobs) == len(made.token_ids)

    async def test_abort_of_the_unknown_is_no_error(self, subject: Subject) -> None:
        await subject.backend.abort(["never-seen"])
        await subject.backend.abort([])

    async def test_cancel_stops_the_server(self, subject: Subject) -> None:
        task, first = subject.start(subject.request(max_tokens=subject.long_tokens))
        async with asyncio.timeout(DEADLINE_S):
            await first.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await self._until(subject, busy=False)
        assert (await subject.generate(subject.request())).token_ids

    async def test_cancel_of_a_whole_answer_stops_the_server(self, subject: Subject) -> None:
        if subject.running is None:
            pytest.skip("the subject can't tell what its server is doing")
        request = subject.request(max_tokens=subject.long_tokens)
        task = asyncio.create_task(subject.backend.generate(request))
        async with asyncio.timeout(DEADLINE_S):
            await self._until(subject, busy=True)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await self._until(subject, busy=False)

    async def _until(self, subject: Subject, *, busy: bool) -> None:
        """Ask again and again: a server on the other side of a socket sets no event here."""
        for _ in range(int(DEADLINE_S / 0.005)):
            if subject.running is None or (await subject.running() > 0) == busy:
                return
            await asyncio.sleep(0.005)
        raise TimeoutError(f"the server did not become {'busy' if busy else 'idle'}")

    async def test_healthy(self, subject: Subject) -> None:
        health = await subject.backend.health()
        assert health.ok, health.detail

    async def test_close_twice(self, subject: Subject) -> None:
        await subject.generate(subject.request())
        await subject.backend.close()
        await subject.backend.close()
