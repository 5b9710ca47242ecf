"""Calls of an attempt to samples: one path from a root each. Pure.

The fewest sequences that hold each sampled token that is to be trained: a path ends at a call that sampled
something and has no descendant that did. A call that was aborted counts like any other: what it sampled, it
sampled. Where paths share calls, the shared tokens are trained in the first path only. A path ends before a
call that is not exact; what stands on such a call is left out with it. Each sampled token is therefore
trained once, or left out for one reason (``left_out``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from rollserve.gateway.lineage import settled
from rollserve.gateway.truth import NO_TOKENS
from rollserve.records.call import Call, Message, unpack_floats, unpack_ids
from rollserve.records.image import PlacedImage, split_at_images
from rollserve.records.rollout import Rollout
from rollserve.records.run import RunSpec
from rollserve.records.sample import LabelTokens, Sample, TokenReport

SAMPLING_MASK = "sampling_mask"
"""The extra that makes a constrained call trainable."""

RULED = ("label_", "route_")
"""Begin the reasons that are the run's own rules."""

_BYTES = np.dtype(np.uint8)


def _said(call: Call) -> bool:
    """Whether the model said anything in it, with or without ids."""
    return bool(call.sampled_ids) or call.inexact == NO_TOKENS


def left_out(calls: Sequence[Call], run: RunSpec) -> dict[str, str]:
    """Why a call's sampled tokens are not trained, by its id; calls that are trained are not in it."""
    labels, spoiled = settled(calls), _spoiled(calls)
    reasons: dict[str, str] = {}
    for call in calls:
        if (route := call.route or call.policy) and not run.trains(route):
            reasons[call.id] = f"route_{route}"
        elif labels[call.id] not in run.train_labels:
            reasons[call.id] = f"label_{labels[call.id]}"
        elif call.id in spoiled:
            reasons[call.id] = spoiled[call.id]
        elif not trainable(call):
            reasons[call.id] = "constrained"
    return reasons


def is_cause(reason: str) -> bool:
    """Whether a reason of ``left_out`` says that a call is not token-exact."""
    return not reason.startswith(RULED) and reason not in ("constrained", "too_old")


def token_report(calls: Sequence[Call], samples: Sequence[Sample], run: RunSpec) -> TokenReport:
    """What became of the sampled tokens: each is trained, or counted under a reason."""
    reasons, labels = left_out(calls, run), settled(calls)
    kept: dict[str, int] = {}
    by_label: dict[str, LabelTokens] = {}
    for call in calls:
        count, reason = len(call.sampled_ids) // 4, reasons.get(call.id)
        if reason is not None and count:
            kept[reason] = kept.get(reason, 0) + count
        so_far = by_label.get(labels[call.id], LabelTokens())
        by_label[labels[call.id]] = LabelTokens(
            calls=so_far.calls + 1,
            sampled=so_far.sampled + count,
            trained=so_far.trained + (0 if reason else count),
        )
    return TokenReport(
        calls=sum(1 for call in calls if call.sampled_ids),
        sequences=sum(1 for sample in samples if sample.exact),
        sampled=sum(len(call.sampled_ids) // 4 for call in calls),
        trained=sum(int(sample.loss_mask.sum()) for sample in samples),
        tokens=sum(len(sample.ids) for sample in samples if sample.exact),
        left_out=kept,
        by_label=by_label,
    )


def _spoiled(calls: Sequence[Call]) -> dict[str, str]:
    """Calls that are not exact or stand on one that is not, with its cause."""
    spoiled: dict[str, str] = {}
    for call in calls:  # a parent comes before its children
        if call.parent in spoiled:
            spoiled[call.id] = spoiled[call.parent]
        elif call.inexact is not None and _said(call):
            spoiled[call.id] = call.inexact
    return spoiled


def build_samples(
    calls: Sequence[Call],
    *,
    rollout: Rollout,
    run: RunSpec,
    call_rewards: Mapping[str, float] | None = None,
    every_call: bool = False,
) -> list[Sample]:
    """One sample a path; with ``every_call`` each call ends one of its own, in which only it is trained.
    What is not exact is left out under ``drop``; under ``text`` it comes as paths of
    its own, with ``exact`` False, their text, and no token trained. (Under ``fail`` the attempt has
    failed before; here it leaves out like ``drop``.)"""
    reasons, spoiled = left_out(calls, run), _spoiled(calls)
    wanted = {call.id for call in calls if reasons.get(call.id, "constrained") == "constrained"}
    if run.on_inexact == "text":
        wanted |= {call_id for call_id, cause in spoiled.items() if reasons[call_id] == cause}
    kept = [(path, spoiled.get(path[-1].id)) for path in _paths(calls, wanted, spoiled, every_call)]
    trained, shares = set(reasons), Counter(path[-1].policy for path, _ in kept)
    samples = []
    for index, (path, cause) in enumerate(kept):
        parts, share = _Arrays(path, trained, exact=cause is None), shares[path[-1].policy]
        rewards = _rewards(path, parts.ends, len(parts.ids), rollout.reward, call_rewards or {})
        place = _Place(index=index, count=len(kept), weight=1.0 / share)
        samples.append(_sample(rollout, path, cause, parts, rewards, place))
        if cause is None:
            trained.update(call.id for call in path)
    return samples


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a sample among those of its rollout."""

    index: int
    count: int
    weight: float


def _sample(
    rollout: Rollout,
    path: Sequence[Call],
    cause: str | None,
    parts: _Arrays,
    rewards: NDArray[np.float32],
    place: _Place,
) -> Sample:
    return Sample(
        rollout_id=rollout.id,
        rollout_index=rollout.index,
        index=place.index,
        count=place.count,
        weight=place.weight,
        policy=path[-1].policy,
        reward=rollout.reward,
        rewards=rewards,
        ids=parts.ids,
        loss_mask=parts.mask,
        logprobs=parts.logprobs,
        versions=parts.versions,
        extras=parts.extras,
        exact=cause is None,
        cause=cause,
        text=None if cause is None else conversation_text(path),
        truncated_by=rollout.truncated_by,
        mixed_versions=any(_mixed(call) for call in path),
        inferred_versions=any(span.inferred for call in path for span in call.versions),
        call_ids=tuple(call.id for call in path),
        images=_images(path),
    )


def conversation_text(path: Sequence[Call]) -> str:
    """A path as text, for people and for runs that keep inexact paths as text."""
    lines: list[str] = []
    for call in path:
        for message in (*call.messages, call.reply):
            lines.append(f"[{message.role}]\n{_message_text(message)}")
    return "\n\n".join(lines)


def _message_text(message: Message) -> str:
    parts = [f"<think>\n{message.reasoning}\n</think>"] if message.reasoning else []
    if message.content or message.images:
        parts.append(_seen_text(message))
    parts += [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(parts)


def _seen_text(message: Message) -> str:
    """With the name of each image where it stands."""
    pieces = split_at_images(message.content, message.images)
    names = [f"[image {image.url or f'{image.media_type} {image.digest}'}]" for image in message.images]
    return "".join(piece + name for piece, name in zip(pieces, [*names, ""], strict=True))


def _images(path: Sequence[Call]) -> tuple[PlacedImage, ...]:
    """Those of its calls, placed in the sample. Where there are no ids they have no tokens."""
    found: list[PlacedImage] = []
    start = 0
    for call in path:
        known = call.images or tuple(
            PlacedImage(image=image, start=0, end=0) for each in call.messages for image in each.images
        )
        found += (
            replace(each, start=start + each.start, end=start + each.end, call_id=call.id) for each in known
        )
        start += (len(call.prompt_ids) + len(call.sampled_ids)) // 4
    return tuple(found)


def _paths(
    calls: Sequence[Call], wanted: Container[str], spoiled: Container[str], every_call: bool
) -> list[list[Call]]:
    """Paths from a root to each wanted call with none below it (``every_call``: to each), in the order of
    these. What is spoiled does not stand for the exact calls above it."""
    by_id = {call.id: call for call in calls}
    if every_call:
        return [_path(call, by_id) for call in calls if _said(call) and call.id in wanted]
    inner: set[str] = set()
    for call in calls:
        if not _said(call) or call.id not in wanted:
            continue
        parent = call.parent
        while parent is not None and parent not in inner and parent in by_id:
            if (parent in spoiled) == (call.id in spoiled):
                inner.add(parent)
            parent = by_id[parent].parent
    leaves = (call for call in calls if _said(call) and call.id in wanted and call.id not in inner)
    return [_path(leaf, by_id) for leaf in leaves]


def _path(leaf: Call, by_id: Mapping[str, Call]) -> list[Call]:
    path = [leaf]
    while (parent := path[-1].parent) is not None and parent in by_id:
        path.append(by_id[parent])
    return path[::-1]


def _mixed(call: Call) -> bool:
    return any(span.mixed for span in call.versions)


def trainable(call: Call) -> bool:
    """A grammar or forced tool shapes the distribution; only its mask makes the logprobs usable."""
    return not call.constrained or SAMPLING_MASK in call.extras


class _Arrays:
    """The arrays of a path, and ``ends``: after each call, the index of its last sampled token (-1
    where it sampled none)."""

    def __init__(self, path: Sequence[Call], trained: Container[str], *, exact: bool) -> None:
        ids, mask, logprobs, versions = [], [], [], []
        self.ends: list[int] = []
        self.length = 0
        for call in path:
            prompt, sampled = unpack_ids(call.prompt_ids), unpack_ids(call.sampled_ids)
            train = exact and call.id not in trained
            ids += [prompt, sampled]
            mask += [np.zeros(len(prompt), np.bool_), np.full(len(sampled), train)]
            logprobs += [np.zeros(len(prompt), np.float32), _fitted(call, len(sampled))]
            versions += [np.full(len(prompt), -1, np.int32), _versions(call, len(sampled))]
            self.length += len(prompt) + len(sampled)
            self.ends.append(self.length - 1 if len(sampled) else -1)
        self.ids = np.concatenate(ids).astype(np.int32, copy=False)
        self.mask = np.concatenate(mask)
        self.logprobs = np.concatenate(logprobs).astype(np.float32, copy=False)
        self.versions = np.concatenate(versions)
        self.extras = _extras(path, self.ends, self.length)


def _fitted(call: Call, count: int) -> NDArray[np.float32]:
    """Logprobs of an inexact call may not be one a token."""
    values = unpack_floats(call.logprobs)
    return values if len(values) == count else np.zeros(count, np.float32)


def _versions(call: Call, count: int) -> NDArray[np.int32]:
    versions = np.full(count, -1, np.int32)
    for span in call.versions:
        versions[span.start : span.end] = span.version
    return versions


def _extras(path: Sequence[Call], ends: list[int], length: int) -> dict[str, NDArray[np.generic]]:
    """Opaque bytes, as rows ``uint8 [length, bytes a token]`` where every call has as many a token;
    rows of tokens that were not sampled are zero. Others stay with their calls."""
    rows: dict[str, NDArray[np.generic]] = {}
    for name in {name for call in path for name in call.extras}:
        widths = {_width(call, name) for call in path if call.sampled_ids}
        if len(widths) != 1 or None in widths:
            continue
        array = np.zeros((length, widths.pop() or 0), _BYTES)
        for call, end in zip(path, ends, strict=True):
            if end >= 0:
                data = np.frombuffer(call.extras[name], _BYTES)
                count = len(call.sampled_ids) // 4
                array[end + 1 - count : end + 1] = data.reshape(count, -1)
        rows[name] = array
    return rows


def _width(call: Call, name: str) -> int | None:
    data, count = call.extras.get(name), len(call.sampled_ids) // 4
    if not data or len(data) % count:
        return None
    return len(data) // count


def _rewards(
    path: Sequence[Call],
    ends: Sequence[int],
    length: int,
    reward: float | None,
    call_rewards: Mapping[str, Any],
) -> NDArray[np.float32]:
    """Per-call rewards where a grader gave any for this path, else the rollout's at the path's end."""
    rewards = np.zeros(length, np.float32)
    if reward is None or not length:
        return rewards
    given = [
        (end, call_rewards[call.id]) for call, end in zip(path, ends, strict=True) if call.id in call_rewards
    ]
    if call_rewards:
        for end, value in given:
            if end >= 0:
                rewards[end] = value
    else:
        rewards[max(ends)] = reward
    return rewards
