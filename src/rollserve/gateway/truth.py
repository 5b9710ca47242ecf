"""What is true of a generation: whose weights made each token, and whether ids and logprobs can be
trained on as they are. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from rollserve.backend.base import Generation, LabelSpan
from rollserve.records.call import SamplingParams, VersionSpan, pack_floats, pack_ids
from rollserve.records.ids import Ids
from rollserve.records.policy import MAX_VERSION

NO_TOKENS = "no_tokens"
"""Why a call of an engine that gives text alone can't be trained on: it has no ids at all."""

LOGPROB_SLACK = 1e-3
"""How far above 0 rounding may lift a logprob; more is no probability."""

_GREATEST = (2 - 2**-23) * 2.0**127
"""Number of 32 bits."""


def version_spans(
    labels: Sequence[LabelSpan] | None, count: int, known: Mapping[str, int], low: int, high: int
) -> tuple[VersionSpan, ...]:
    """A span for each of ``count`` tokens, in order. ``known`` maps what the backend calls its weights
    to our version; another label counts when it is a number itself. Tokens without either lie in
    ``[low, high]``, the policy's version at the generation's start and end, and are marked inferred. So
    are those under a number that can be no version (a time stamp, say). What comes after a change of
    version within the generation, or is newer than ``low`` (whose cache it was begun on), is marked mixed;
    so is all that lies in an interval."""
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
    return tuple(_marked(span, spans[0], low) for span in spans)


def _marked(span: VersionSpan, first: VersionSpan, begun_at: int) -> VersionSpan:
    pure = span.version == span.version_high == first.version and span.version <= begun_at
    return span if pure else replace(span, mixed=True)


def begun(spans: Sequence[VersionSpan], count: int) -> tuple[VersionSpan, ...]:
    """Those of the first ``count`` tokens."""
    return tuple(replace(span, end=min(span.end, count)) for span in spans if span.start < count)


def _number(label: str) -> int | None:
    if not (label.isdecimal() and len(label) <= len(str(MAX_VERSION))):
        return None
    number = int(label)
    return number if number <= MAX_VERSION else None


def inexact(
    generation: Generation, sent_ids: Sequence[int], sampling: SamplingParams, logprobs_mode: str
) -> tuple[str | None, bytes]:
    """Why a generation can't be trained on exactly (None: it can), and its packed logprobs."""
    packed = pack_floats(generation.logprobs)
    if generation.reply is not None and generation.prompt_ids is None:
        return NO_TOKENS, packed
    if generation.prompt_ids is not None and not _same(generation.prompt_ids, sent_ids):
        return "backend_ids", packed
    if len(generation.logprobs) != len(generation.token_ids) or not _possible(generation.logprobs):
        return "logprobs", packed
    if logprobs_mode != "processed" and _reshaped(sampling, logprobs_mode):
        return "logprobs_mode", packed
    return None, packed


def _same(consumed: list[int], sent: Sequence[int]) -> bool:
    """Packed ones are compared without making numbers of them."""
    return pack_ids(consumed) == sent.packed if isinstance(sent, Ids) else consumed == sent


def _possible(logprobs: list[float]) -> bool:
    """Whether all are finite in 32 bits, and none is above 0. A sum with one that is no number is none."""
    if not logprobs:
        return True
    return max(logprobs) <= LOGPROB_SLACK and min(logprobs) >= -_GREATEST and sum(logprobs) <= _GREATEST


def _reshaped(sampling: SamplingParams, logprobs_mode: str) -> bool:
    """Whether logprobs of that mode differ from those of the distribution that is sampled."""
    scaled = sampling.temperature != 1.0 and (logprobs_mode != "temperature" or sampling.temperature == 0.0)
    return scaled or sampling.top_p < 1.0 or sampling.top_k > 0
