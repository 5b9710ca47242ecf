"""What is true of a generation: whose weights made each token, and whether ids and logprobs can be
trained on as they are. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rollserve.backend.base import Generation, LabelSpan
from rollserve.records.call import SamplingParams, VersionSpan, pack_floats
from rollserve.records.policy import MAX_VERSION

LOGPROB_SLACK = 1e-3
"""How far above 0 rounding may lift a logprob; more is no probability."""


def version_spans(
    labels: Sequence[LabelSpan] | None, count: int, known: Mapping[str, int], low: int, high: int
) -> tuple[VersionSpan, ...]:
    """A span for each of ``count`` tokens, in order. ``known`` maps what the backend calls its weights
    to our version; another label counts when it is a number itself. Tokens without either lie in
    ``[low, high]``, the policy's version at the generation's start and end, and are marked inferred. So
    are those under a number that can be no version (a time stamp, say)."""
    spans: list[VersionSpan] = []
    at = 0
    for span in sorted(labels or (), key=lambda item: item.start):
        start, end = max(at, span.start), min(count, span.end)
        if end <= start:
            continue
        if start > at:
            spans.append(VersionSpan(at, start, low, high, True))
        version = known.get(span.label, _number(span.label))
        if version is None:
            spans.append(VersionSpan(start, end, low, high, True))
        else:
            spans.append(VersionSpan(start, end, version, version))
        at = end
    if at < count:
        spans.append(VersionSpan(at, count, low, high, True))
    return tuple(spans)


def _number(label: str) -> int | None:
    if not (label.isdecimal() and len(label) <= len(str(MAX_VERSION))):
        return None
    number = int(label)
    return number if number <= MAX_VERSION else None


def inexact(
    generation: Generation, sent_ids: list[int], sampling: SamplingParams, logprobs_mode: str
) -> tuple[str | None, bytes]:
    """Why a generation can't be trained on exactly (None: it can), and its packed logprobs."""
    packed = pack_floats(generation.logprobs)
    if generation.prompt_ids is not None and generation.prompt_ids != sent_ids:
        return "backend_ids", packed
    logprobs = np.frombuffer(packed, "<f4")
    possible = bool((np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK)).all())
    if len(generation.logprobs) != len(generation.token_ids) or not possible:
        return "logprobs", packed
    if logprobs_mode != "processed" and _reshaped(sampling):
        return "logprobs_mode", packed
    return None, packed


def _reshaped(sampling: SamplingParams) -> bool:
    """Whether raw logprobs differ from those of the distribution that is sampled."""
    return sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
