"""A finished rollout's samples, proved: whole as they are (``gateway.proof``), and, on a backend that
serves the weights they were sampled from, as probable as they were said to be. A wrong template or wrong
weights show as a number."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

from rollserve.backend.base import Backend as Client
from rollserve.backend.base import GenerateRequest
from rollserve.errors import InvalidInput, RollserveError
from rollserve.gateway.proof import check_sample, check_together, stretches_of
from rollserve.gateway.samples import left_out
from rollserve.gateway.tokens import TextTokenizer, load_tokenizer
from rollserve.gateway.truth import version_spans
from rollserve.records.base import new_id
from rollserve.records.call import Call, SamplingParams, VersionSpan
from rollserve.records.policy import Backend, BackendState, Policy
from rollserve.records.run import RunSpec
from rollserve.records.sample import Sample
from rollserve.records.verification import Difference, Finding, SampleCheck, Verification
from rollserve.rollouts.policies import MAX_BACKENDS, no_backend
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.trajectories import Trajectories

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = 2
"""Verifications; more wait their turn."""
_LOOK_S = 60.0
_TRIED = 8
"""Backends, until one is found that scores."""
_TOKENIZERS = 2
"""Kept loaded: a run is verified rollout by rollout."""


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """``backend_id`` None takes any active one that scores; ``score`` False none. A sample is wrong whose
    difference is above these, in nats."""

    score: bool = True
    backend_id: str | None = None
    max_difference: float = 1.0
    mean_difference: float = 0.05


@dataclass(slots=True)
class _Scorer:
    """``why`` there is no client: no backend, or none that scores."""

    policy: Policy
    backend: Backend | None = None
    client: Client | None = None
    why: str | None = None

    async def aclose(self) -> None:
        if self.client is not None:
            await self.client.close()


@dataclass(slots=True)
class Comparable:
    """``places`` are indices into the sample; ``skipped`` counts tokens by the reason."""

    places: list[int] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def _check_together(samples: list[Sample], calls: dict[str, Call], run: RunSpec) -> list[Finding]:
    return check_together(samples, calls, left_out(list(calls.values()), run))


class Verifier:
    """Tokenizers are loaded, and read, in a thread of its own."""

    def __init__(self, ports: Ports, trajectories: Trajectories) -> None:
        self._store = ports.store
        self._open = ports.open_backend
        self._trajectories = trajectories
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._tokenizers: dict[str, TextTokenizer] = {}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def verify(self, rollout_id: str, criteria: Criteria) -> Verification:
        """Raises ``NotFound`` for no such rollout or backend. What is wrong with the rollout is in the
        answer; what can't be checked too."""
        async with self._turns:
            made = await self._trajectories.samples(rollout_id)
            if not made.samples:
                note = made.note or f"it is {made.rollout.state.value} and has no samples"
                return Verification(rollout_id=rollout_id, samples=[], note=note)
            attempt_id = made.rollout.attempt_id
            recorded = await self._trajectories.of_rollout(rollout_id, attempt_id)
            calls = {call.id: call for call in recorded.payload.calls}
            run = await self._store.get_run(made.rollout.run_id)
            checks: dict[int, _Check] = {}
            for name in dict.fromkeys(sample.policy for sample in made.samples):
                policy = await self._store.get_policy(name or run.spec.policy)
                of_it = {at: each for at, each in enumerate(made.samples) if each.policy == name}
                # A backend that is named is one of the run's own policy.
                wanted = replace(criteria, score=False) if name and criteria.backend_id else criteria
                checks |= await self._check(of_it, calls, policy, wanted)
            return Verification(
                rollout_id=rollout_id,
                samples=[checks[at].done() for at in sorted(checks)],
                findings=await self._work(_check_together, made.samples, calls, run.spec),
            )

    async def _check(
        self, samples: Mapping[int, Sample], calls: dict[str, Call], policy: Policy, criteria: Criteria
    ) -> dict[int, _Check]:
        """Of samples of one policy, by their places."""
        tokenizer = await self._tokenizer(policy)
        checks = {at: await self._structure(each, calls, tokenizer, policy) for at, each in samples.items()}
        async with aclosing(await self._scorer(policy, criteria)) as scorer:
            for at, sample in samples.items():
                await self._score(checks[at], sample, calls, scorer, tokenizer, criteria)
        return checks

    async def _work(self, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """What takes as long as a sample does."""
        task = partial(work, *given, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, task)

    # ── structure

    async def _tokenizer(self, policy: Policy) -> TextTokenizer | None:
        """None where there is none, or this machine can't have it: then ids are not read."""
        name = policy.spec.tokenizer
        if name is None:
            return None
        if name not in self._tokenizers:
            try:
                loaded = await self._work(load_tokenizer, name)
            except InvalidInput:
                return None
            self._tokenizers[name] = loaded
            if len(self._tokenizers) > _TOKENIZERS:
                del self._tokenizers[next(iter(self._tokenizers))]
        return self._tokenizers[name]

    async def _structure(
        self, sample: Sample, calls: Mapping[str, Call], tokenizer: TextTokenizer | None, policy: Policy
    ) -> _Check:
        proof = await self._work(check_sample, sample, calls, tokenizer, policy.version)
        return _Check(sample, proof.findings, proof.respelled)

    # ── scores

    async def _scorer(self, policy: Policy, criteria: Criteria) -> _Scorer:
        """The first active backend that scores, or the one named."""
        if not criteria.score:
            return _Scorer(policy, why="not asked for")
        name = policy.spec.name
        known = (await self._store.list_backends(name, limit=MAX_BACKENDS)).items
        asked = [backend for backend in known if criteria.backend_id in (None, backend.id)]
        if criteria.backend_id is not None and not asked:
            raise no_backend(name, criteria.backend_id, known)
        able = [backend for backend in asked if backend.state is BackendState.ACTIVE]
        why = f"policy {name!r} has no active backend"
        for backend in able[:_TRIED]:
            client = self._open(backend.spec, policy.spec.model)
            try:
                await client.score([1, 2], model=policy.spec.model)
                return _Scorer(policy, backend, client)
            except RollserveError as error:
                why = f"backend {backend.id} can't score: {error.message}"
                await client.close()
        return _Scorer(policy, why=why)

    async def _score(
        self,
        check: _Check,
        sample: Sample,
        calls: Mapping[str, Call],
        scorer: _Scorer,
        tokenizer: TextTokenizer | None,
        criteria: Criteria,
    ) -> None:
        if scorer.client is None or scorer.backend is None or not sample.exact or check.findings:
            check.not_scored = scorer.why or ("not exact" if not sample.exact else "it is broken")
            return
        if sample.images:
            check.not_scored = "the model saw images, and a score is of ids alone"
            return
        try:
            serves = await self._serves(scorer.client, scorer.backend, scorer.policy)
            found = await self._work(comparable, sample, calls, serves)
            if not found.places:
                check.not_scored = "; ".join(sorted(found.skipped)) or "nothing of it is trained"
                return
            scores = await scorer.client.score(sample.ids.tolist(), model=scorer.policy.spec.model)
            after = await self._serves(scorer.client, scorer.backend, scorer.policy)
        except (RollserveError, TimeoutError) as error:
            check.not_scored = f"backend {scorer.backend.id}: {error or 'no answer in time'}"
            return
        if after != serves:
            check.not_scored = f"the backend went from version {serves} to {after} meanwhile"
            return
        where = (scorer.backend.id, serves)
        check.difference = await self._work(_difference, sample, found, scores, where, tokenizer)
        check.judge(criteria)

    async def _serves(self, client: Client, backend: Backend, policy: Policy) -> int:
        """The version of the weights that answer now: by their own label, where the backend tells one."""
        if not backend.info.reports_versions:
            return (await self._store.get_policy(policy.spec.name)).version
        request = GenerateRequest(
            request_id=new_id("ver"),
            model=policy.spec.model,
            token_ids=[1, 2],
            sampling=SamplingParams(max_tokens=1),
        )
        async with asyncio.timeout(_LOOK_S):
            made = await client.generate(request)
        current = await self._store.get_policy(policy.spec.name)
        spans = version_spans(
            made.labels, len(made.token_ids), current.labels, current.version, current.version
        )
        return spans[-1].version if spans else current.version


@dataclass(slots=True)
class _Check:
    """A ``SampleCheck`` in the making."""

    sample: Sample
    findings: list[Finding]
    respelled: int
    difference: Difference | None = None
    not_scored: str | None = None

    def judge(self, criteria: Criteria) -> None:
        found = self.difference
        if found is None:
            return
        if found.mean > criteria.mean_difference or found.max > criteria.max_difference:
            detail = (
                f"logprobs differ by {found.mean:.4f} on average and {found.max:.4f} at most "
                f"(allowed: {criteria.mean_difference:g}, {criteria.max_difference:g})"
            )
            self.findings = [*self.findings, Finding(check="difference", detail=detail, at=found.at)]

    def done(self) -> SampleCheck:
        return SampleCheck(
            index=self.sample.index,
            tokens=len(self.sample.ids),
            trained=int(self.sample.loss_mask.sum()),
            respelled=self.respelled,
            findings=self.findings,
            difference=self.difference,
            not_scored=self.not_scored,
        )


def comparable(sample: Sample, calls: Mapping[str, Call], serves: int) -> Comparable:
    """Trained tokens whose recorded logprob is of the model's own distribution, under the weights served
    now; the others by the reason that they can't be compared."""
    found = Comparable()
    for stretch in stretches_of(sample, calls):
        if not stretch.sampled or not sample.loss_mask[stretch.start : stretch.start + 1].any():
            continue
        reason = _shaped(stretch.call)
        if reason is not None:
            found.skipped[reason] += len(stretch.ids)
            continue
        for span in stretch.call.versions:
            if span.version == span.version_high == serves:
                places = range(stretch.start + span.start, stretch.start + span.end)
                found.places += [at for at in places if at > 0]
            else:
                found.skipped[f"{_whose(span)}, the backend serves {serves}"] += span.end - span.start
    return found


def _whose(span: VersionSpan) -> str:
    if span.version == span.version_high:
        return f"sampled by version {span.version}"
    return f"sampled by version {span.version} to {span.version_high}"


def _shaped(call: Call) -> str | None:
    """Why a call's logprobs are not those of the model at temperature 1."""
    sampling = call.sampling
    if call.constrained:
        return "sampled under a constraint"
    if call.logprobs_mode == "raw":
        return None
    parts = [f"temperature {sampling.temperature:g}"] if sampling.temperature != 1.0 else []
    if call.logprobs_mode != "temperature":
        parts += [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1.0 else []
        parts += [f"top_k {sampling.top_k}"] if sampling.top_k > 0 else []
    return f"sampled at {', '.join(parts)}" if parts else None


def _difference(
    sample: Sample,
    found: Comparable,
    scores: list[float],
    where: tuple[str, int],
    tokenizer: TextTokenizer | None,
) -> Difference:
    gaps = {at: abs(float(sample.logprobs[at]) - scores[at - 1]) for at in found.places}
    at = max(gaps, key=gaps.__getitem__)
    token_id = int(sample.ids[at])
    return Difference(
        backend_id=where[0],
        version=where[1],
        compared=len(gaps),
        mean=sum(gaps.values()) / len(gaps),
        max=gaps[at],
        at=at,
        token_id=token_id,
        text="" if tokenizer is None else tokenizer.token_text(token_id),
        recorded=float(sample.logprobs[at]),
        scored=scores[at - 1],
        skipped=dict(found.skipped),
    )
