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

from rollserve.backend.base import Backend, Chat, Delta, GenerateRequest, Generation, TokenSink
from rollserve.errors import CannotScore, ContextTooLong
from rollserve.records.call import Message, SamplingParams

DEADLINE_S = 30.0


@dataclass(kw_only=True)
class Subject:
    """``running`` tells how many generations the server works on, where it can be known. ``overlong``
    is the length of a prompt that does not fit. ``scores``: it gives the logprobs of a prompt. They are
    the model's own; ``sampled_is_scored``: so are those of what it samples at temperature 1. ``chat``: the
    engine renders, so that a prompt is a message, made of ``prompt_ids`` for the sake of the tests."""

    backend: Backend
    model: str
    prompt_ids: list[int] = field(default_factory=lambda: [1, 5, 9, 13])
    overlong: int = 0
    long_tokens: int = 200
    running: Callable[[], Awaitable[int]] | None = None
    reports_prompt: bool = True
    scores: bool = True
    sampled_is_scored: bool = True
    chat: bool = False

    def request(self, **sampling: Any) -> GenerateRequest:
        """``stop`` never comes early: greedy, and no more than ``max_tokens``."""
        given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, **sampling}
        request = GenerateRequest(
            request_id=f"conformance-{uuid.uuid4().hex}",
            model=self.model,
            token_ids=[],
            sampling=SamplingParams(**given),
        )
        return self.of(request, self.prompt_ids)

    def of(self, request: GenerateRequest, ids: list[int]) -> GenerateRequest:
        """The request with another prompt."""
        if not self.chat:
            return msgspec.structs.replace(request, token_ids=list(ids))
        text = " ".join(map(str, ids))
        return msgspec.structs.replace(request, chat=Chat(messages=(Message(role="user", content=text),)))

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        async with asyncio.timeout(DEADLINE_S):
            return await self.backend.generate(request, on_tokens)

    def start(self, request: GenerateRequest) -> tuple[asyncio.Task[Generation], asyncio.Event]:
        """A streamed generation, and an event that is set at its first token, or its first text."""
        first, calls = asyncio.Event(), 0

        def sink(ids: list[int], logprobs: list[float]) -> None:
            nonlocal calls
            calls += 1
            if ids or calls > 1:
                first.set()

        return asyncio.create_task(self.backend.generate(request, sink)), first

    async def aborted(self) -> Generation:
        """One that was aborted after its first token."""
        request = self.request(max_tokens=self.long_tokens)
        task, first = self.start(request)
        async with asyncio.timeout(DEADLINE_S):
            await first.wait()
            await self.backend.abort([request.request_id])
            made = await task
        assert made.finish_reason == "abort"
        return made


class BackendConformance:
    """The suite."""

    async def test_probe_says_what_it_is(self, subject: Subject) -> None:
        info = await subject.backend.probe()
        assert subject.model in info.models
        assert info.engine
        assert info.logprobs_mode in ("processed", "temperature", "raw", "unknown")
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
        if subject.chat and subject.reports_prompt:
            assert made.prompt_ids
        elif subject.reports_prompt:
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

    async def test_a_sink_that_has_enough_ends_it_with_what_it_had(self, subject: Subject) -> None:
        """First it hears that the request was taken, if that can be told."""
        heard: list[int] = []

        def sink(ids: list[int], logprobs: list[float]) -> bool:
            heard.append(len(ids))
            return len(ids) > 0

        whole = await subject.generate(subject.request())
        made = await subject.generate(subject.request(), sink)
        assert 0 not in heard[1:]
        assert sum(heard) == len(made.token_ids) > 0
        assert made.token_ids == whole.token_ids[: len(made.token_ids)]
        assert len(made.logprobs) == len(made.token_ids)
        assert made.finish_reason == "abort"
        assert made.labels is None or made.labels[-1].end == len(made.token_ids)
        await self._until(subject, busy=False)

    async def test_prompt_beyond_the_context(self, subject: Subject) -> None:
        if not subject.overlong:
            pytest.skip("the subject names no overlong prompt")
        ids = [1 + at % 7 for at in range(subject.overlong)]
        request = subject.of(subject.request(), ids)
        with pytest.raises(ContextTooLong):
            await subject.generate(request)

    async def test_many_at_once_are_not_mixed_up(self, subject: Subject) -> None:
        prompts = [[1 + at, 2, 3] for at in range(8)]
        requests = [subject.of(subject.request(), ids) for ids in prompts]
        alone = [(await subject.generate(request)).token_ids for request in requests]
        again = [msgspec.structs.replace(r, request_id=f"{r.request_id}-b") for r in requests]
        together = await asyncio.gather(*(subject.generate(request) for request in again))
        assert [made.token_ids for made in together] == alone

    async def test_scores_each_token_but_the_first(self, subject: Subject) -> None:
        if not subject.scores:
            with pytest.raises(CannotScore):
                await subject.backend.score([1, 2, 3], model=subject.model)
            return
        scores = await subject.backend.score(list(subject.prompt_ids), model=subject.model)
        assert len(scores) == len(subject.prompt_ids) - 1
        assert all(math.isfinite(value) and value <= 1e-4 for value in scores)
        again = await subject.backend.score(list(subject.prompt_ids), model=subject.model)
        assert again == pytest.approx(scores, abs=1e-4)
        assert await subject.backend.score([7], model=subject.model) == []

    async def test_what_was_sampled_is_scored_the_same(self, subject: Subject) -> None:
        """The one comparison that ``rollserve verify`` makes."""
        if not (subject.scores and subject.sampled_is_scored):
            pytest.skip("the subject's logprobs are not the model's own")
        made = await subject.generate(subject.request(temperature=1.0, max_tokens=6, seed=3))
        ids = [*subject.prompt_ids, *made.token_ids]
        scores = await subject.backend.score(ids, model=subject.model)
        assert scores[len(subject.prompt_ids) - 1 :] == pytest.approx(made.logprobs, abs=1e-3)

    async def test_abort_ends_it_with_what_it_had(self, subject: Subject) -> None:
        made = await subject.aborted()
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
        again = await subject.generate(subject.request())
        assert again.token_ids or again.reply

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
        seen = await subject.backend.look()
        assert seen.ok, seen.detail

    async def test_close_twice(self, subject: Subject) -> None:
        await subject.generate(subject.request())
        await subject.backend.close()
        await subject.backend.close()


class TextConformance(BackendConformance):
    """The suite for a service that gives text alone: what the other says of ids, of text."""

    async def test_every_sampled_id_has_a_logprob(self, subject: Subject) -> None:
        made = await subject.generate(subject.request(temperature=1.0))
        assert (made.token_ids, made.logprobs, made.prompt_ids) == ([], [], None)
        assert _text(made)
        assert made.finish_reason in ("stop", "length")

    async def test_max_tokens_is_a_length_stop(self, subject: Subject) -> None:
        made = await subject.generate(subject.request(max_tokens=2))
        assert made.finish_reason == "length"
        assert made.usage is None or made.usage.sampled_tokens == 2

    async def test_greedy_is_deterministic(self, subject: Subject) -> None:
        first = await subject.generate(subject.request())
        assert _text(first) == _text(await subject.generate(subject.request()))

    async def test_stop_token_is_kept(self, subject: Subject) -> None:
        """There are no tokens here, and none are claimed."""
        made = await subject.generate(subject.request())
        assert (made.token_ids, made.logprobs) == ([], [])

    async def test_streamed_tokens_are_those_of_the_result(self, subject: Subject) -> None:
        heard: list[Delta] = []
        streamed = await subject.generate(_hearing(subject.request(), heard), lambda ids, logprobs: None)
        whole = await subject.generate(subject.request())
        assert "".join(delta.text for delta in heard) == _text(streamed) == _text(whole)
        assert streamed.finish_reason == whole.finish_reason
        assert streamed.usage == whole.usage

    async def test_a_sink_that_has_enough_ends_it_with_what_it_had(self, subject: Subject) -> None:
        heard: list[Delta] = []
        request = _hearing(subject.request(max_tokens=subject.long_tokens), heard)
        made = await subject.generate(request, lambda ids, logprobs: bool(heard))
        assert made.finish_reason == "abort"
        assert "".join(delta.text for delta in heard) == _text(made) != ""
        await self._until(subject, busy=False)

    async def test_many_at_once_are_not_mixed_up(self, subject: Subject) -> None:
        requests = [subject.of(subject.request(), [1 + at, 2, 3]) for at in range(8)]
        alone = [_text(await subject.generate(request)) for request in requests]
        again = [msgspec.structs.replace(r, request_id=f"{r.request_id}-b") for r in requests]
        together = await asyncio.gather(*(subject.generate(request) for request in again))
        assert [_text(made) for made in together] == alone

    async def test_abort_ends_it_with_what_it_had(self, subject: Subject) -> None:
        made = await subject.aborted()
        assert _text(made)


def _text(made: Generation) -> str:
    return "" if made.reply is None else made.reply.content


def _hearing(request: GenerateRequest, heard: list[Delta]) -> GenerateRequest:
    assert request.chat is not None
    return msgspec.structs.replace(request, chat=msgspec.structs.replace(request.chat, hear=heard.extend))
