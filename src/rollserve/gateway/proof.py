"""Are samples what they say they are? Without a model: arrays against the calls they were made of, ids
against their text. Pure, and as long as the samples are: run it in a thread."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollserve.gateway.samples import trainable
from rollserve.gateway.tokens import TextTokenizer
from rollserve.gateway.truth import LOGPROB_SLACK
from rollserve.records.call import Call, unpack_floats, unpack_ids
from rollserve.records.sample import Sample
from rollserve.records.verification import Check, Finding

_UNREADABLE = "\ufffd"


@dataclass(slots=True)
class Proof:
    """Of one sample."""

    findings: list[Finding] = field(default_factory=list)
    respelled: int = 0

    def wrong(self, check: Check, detail: str, at: int | None = None) -> None:
        self.findings.append(Finding(check=check, detail=detail, at=at))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Ids of one call in a sample, from ``start``."""

    call: Call
    start: int
    ids: list[int]
    sampled: bool


def check_sample(
    sample: Sample, calls: Mapping[str, Call], tokenizer: TextTokenizer | None, version: int
) -> Proof:
    """``version`` is the policy's now: no token is of a later one. Without a tokenizer ids are not read."""
    proof = Proof()
    length = len(sample.ids)
    arrays = {"loss_mask": sample.loss_mask, "logprobs": sample.logprobs, "versions": sample.versions}
    for name, array in {**arrays, "rewards": sample.rewards, **sample.extras}.items():
        if len(array) != length:
            proof.wrong("arrays", f"{name} has {len(array)} entries of {length} tokens")
    missing = [call_id for call_id in sample.call_ids if call_id not in calls]
    if missing:
        proof.wrong("ids", f"made of calls that there are not: {', '.join(missing)}")
    if proof.findings:
        return proof
    stretches = list(stretches_of(sample, calls))
    if not _same_ids(sample, stretches, proof):
        return proof
    _check_tokens(sample, stretches, proof, version)
    for call in (calls[call_id] for call_id in sample.call_ids):
        _check_spans(call, proof)
    if tokenizer is not None:
        for stretch in stretches:
            _check_text(stretch, tokenizer, proof)
    return proof


def stretches_of(sample: Sample, calls: Mapping[str, Call]) -> Iterator[Stretch]:
    at = 0
    for call in (calls[call_id] for call_id in sample.call_ids):
        for data, sampled in ((call.prompt_ids, False), (call.sampled_ids, True)):
            ids = unpack_ids(data).tolist()
            yield Stretch(call, at, ids, sampled)
            at += len(ids)


def _same_ids(sample: Sample, stretches: Sequence[Stretch], proof: Proof) -> bool:
    ids = [token_id for stretch in stretches for token_id in stretch.ids]
    if len(ids) != len(sample.ids):
        proof.wrong("ids", f"its calls hold {len(ids)} tokens, it has {len(sample.ids)}")
        return False
    other = np.flatnonzero(np.asarray(ids, dtype=np.int32) != sample.ids)
    if len(other):
        proof.wrong("ids", f"{len(other)} ids are not those of its calls", int(other[0]))
    return not len(other)


def _check_tokens(sample: Sample, stretches: Sequence[Stretch], proof: Proof, version: int) -> None:
    sampled = np.zeros(len(sample.ids), np.bool_)
    for stretch in stretches:
        sampled[stretch.start : stretch.start + len(stretch.ids)] = stretch.sampled
    _each(proof, "mask", "trained, and not sampled", sample.loss_mask & ~sampled)
    _each(proof, "mask", "trained, and the sample is not exact", sample.loss_mask & (not sample.exact))
    finite = np.isfinite(sample.logprobs)
    _each(proof, "logprobs", "no number", ~finite)
    _each(proof, "logprobs", "above 0", finite & (sample.logprobs > LOGPROB_SLACK))
    _each(proof, "logprobs", "of a token that was not sampled", finite & (sample.logprobs != 0) & ~sampled)
    _each(proof, "versions", "sampled, without a version", sampled & (sample.versions < 0))
    _each(proof, "versions", "not sampled, with a version", ~sampled & (sample.versions != -1))
    _each(proof, "versions", f"later than the policy's {version}", sample.versions > version)


def _each(proof: Proof, check: Check, what: str, wrong: np.ndarray) -> None:
    places = np.flatnonzero(wrong)
    if len(places):
        proof.wrong(check, f"{len(places)} tokens: {what}", int(places[0]))


def _check_spans(call: Call, proof: Proof) -> None:
    count = len(call.sampled_ids) // 4
    at = 0
    for span in call.versions:
        if span.start != at or span.end <= span.start or span.version_high < span.version:
            proof.wrong("spans", f"call {call.id}: versions leave out or repeat tokens at {at}")
            return
        at = span.end
    if at != count:
        proof.wrong("spans", f"call {call.id}: versions cover {at} of {count} sampled tokens")
    if len(unpack_floats(call.logprobs)) != count:
        proof.wrong("logprobs", f"call {call.id}: {len(call.logprobs) // 4} logprobs of {count} tokens")


def _check_text(stretch: Stretch, tokenizer: TextTokenizer, proof: Proof) -> None:
    """Ids → text → ids, or at least the same text: a model may spell a text in other tokens than the
    tokenizer would. Where the text is not whole characters it can't be encoded again; then the bytes of
    the tokens must read as that text."""
    text = tokenizer.decode(stretch.ids)
    again = tokenizer.encode(text)
    if again != stretch.ids:
        if _same_text(tokenizer.decode(again), text) or _bytes_read_as(tokenizer, stretch.ids, text):
            proof.respelled += 1
        else:
            detail = f"call {stretch.call.id}: its text does not give the tokens back: {text[:80]!r}"
            proof.wrong("round_trip", detail, stretch.start)
    if stretch.sampled:
        _check_reply(stretch, text, proof)


def _same_text(one: str, other: str) -> bool:
    return unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)


def _bytes_read_as(tokenizer: TextTokenizer, ids: list[int], text: str) -> bool:
    if _UNREADABLE not in text:
        return False
    data = tokenizer.token_bytes(ids)
    return data is not None and data.decode(errors="replace").strip() == text.strip()


def _check_reply(stretch: Stretch, text: str, proof: Proof) -> None:
    """What the agent was given must stand in what was sampled."""
    reply, said = stretch.call.reply, _bare(text)
    parts = [("reasoning", reply.reasoning or ""), ("text", reply.content)]
    parts += [("tool's name", call.name) for call in reply.tool_calls if call.error is None]
    for what, part in parts:
        if part and _bare(part) not in said:
            detail = f"call {stretch.call.id}: the reply's {what} is not in what was sampled: {part[:80]!r}"
            proof.wrong("reply", detail, stretch.start)


def _bare(text: str) -> str:
    """Without blanks, and without what was no character: parsers trim, and cut at token borders."""
    return "".join(text.replace(_UNREADABLE, " ").split())


def check_together(
    samples: Sequence[Sample], calls: Mapping[str, Call], left_out: Container[str] = ()
) -> list[Finding]:
    """What holds of all samples of a rollout: their numbers, their weights, and that each token that can
    be trained is trained once. ``left_out`` are the calls that the run does not train."""
    proof = Proof()
    if [each.index for each in samples] != list(range(len(samples))):
        proof.wrong("weights", f"samples are numbered {[each.index for each in samples]}")
    shares = Counter(sample.policy for sample in samples)
    for sample in samples:
        if sample.count != len(samples) or abs(sample.weight * shares[sample.policy] - 1) > 1e-6:
            proof.wrong("weights", f"sample {sample.index} of {sample.count} weighs {sample.weight}")
    for call_id, times in _times_trained(samples, calls).items():
        if times != (call_id not in left_out):
            proof.wrong("mask", f"call {call_id}: its tokens are trained {times} times")
    return proof.findings


def _times_trained(samples: Sequence[Sample], calls: Mapping[str, Call]) -> Counter[str]:
    """Of calls that can be trained and stand in an exact sample."""
    times: Counter[str] = Counter()
    for sample in samples:
        known = all(call_id in calls for call_id in sample.call_ids)
        for stretch in stretches_of(sample, calls) if known and sample.exact else ():
            call = stretch.call
            if stretch.sampled and stretch.ids and trainable(call):
                mask = sample.loss_mask[stretch.start : stretch.start + len(stretch.ids)]
                times[call.id] += bool(mask.all())
    return times
