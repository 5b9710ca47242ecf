"""Calls of an attempt to samples: one root-to-leaf path each. Pure.

The fewest sequences that hold each sampled token: a path ends at a call that sampled something and has
no descendant that did. A call that was aborted counts like any other: what it sampled, it sampled.
Where paths share calls, the shared tokens are trained in the first path only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollserve.records.call import Call, Message, unpack_floats, unpack_ids
from rollserve.records.rollout import Rollout
from rollserve.records.run import RunSpec
from rollserve.records.sample import Sample

SAMPLING_MASK = "sampling_mask"
"""The extra that makes a constrained call trainable."""

_BYTES = np.dtype(np.uint8)


def inexact_cause(calls: Iterable[Call]) -> str | None:
    """Why the attempt's tokens are not exact; None when they are. For runs that fail on it."""
    return next((call.inexact for call in calls if call.inexact is not None and call.sampled_ids), None)


def build_samples(
    calls: Sequence[Call],
    *,
    rollout: Rollout,
    run: RunSpec,
    call_rewards: Mapping[str, float] | None = None,
) -> list[Sample]:
    """One sample a path. A path with an inexact call is left out under ``drop``; under ``text`` it
    comes with ``exact`` False, its text, and no token trained. (``fail`` is decided before: see
    ``inexact_cause``; here it leaves out like ``drop``.)"""
    paths = [(path, inexact_cause(path)) for path in _paths(calls)]
    kept = [(path, cause) for path, cause in paths if cause is None or run.on_inexact == "text"]
    trained: set[str] = set()
    samples = []
    for index, (path, cause) in enumerate(kept):
        parts = _Arrays(path, trained, exact=cause is None)
        samples.append(
            Sample(
                rollout_id=rollout.id,
                rollout_index=rollout.index,
                index=index,
                count=len(kept),
                weight=1.0 / len(kept),
                reward=rollout.reward,
                rewards=_rewards(path, parts.ends, len(parts.ids), rollout.reward, call_rewards or {}),
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
            )
        )
        if cause is None:
            trained.update(call.id for call in path)
    return samples


def conversation_text(path: Sequence[Call]) -> str:
    """A path as text, for people and for runs that keep inexact paths as text."""
    lines: list[str] = []
    for call in path:
        for message in (*call.messages, call.reply):
            lines.append(f"[{message.role}]\n{_message_text(message)}")
    return "\n\n".join(lines)


def _message_text(message: Message) -> str:
    parts = [f"<think>\n{message.reasoning}\n</think>"] if message.reasoning else []
    if message.content:
        parts.append(message.content)
    parts += [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(parts)


def _paths(calls: Sequence[Call]) -> list[list[Call]]:
    """Root-to-leaf paths, in the order of their leaves."""
    by_id = {call.id: call for call in calls}
    inner: set[str] = set()
    for call in calls:
        parent = call.parent
        while call.sampled_ids and parent is not None and parent not in inner and parent in by_id:
            inner.add(parent)
            parent = by_id[parent].parent
    leaves = (call for call in calls if call.sampled_ids and call.id not in inner)
    return [_path(leaf, by_id) for leaf in leaves]


def _path(leaf: Call, by_id: Mapping[str, Call]) -> list[Call]:
    path = [leaf]
    while (parent := path[-1].parent) is not None and parent in by_id:
        path.append(by_id[parent])
    return path[::-1]


def _mixed(call: Call) -> bool:
    return len({span.version for span in call.versions}) > 1


def _trainable(call: Call) -> bool:
    """A grammar or forced tool shapes the distribution; only its mask makes the logprobs usable."""
    return not call.constrained or SAMPLING_MASK in call.extras


class _Arrays:
    """The arrays of a path, and ``ends``: after each call, the index of its last sampled token (-1
    where it sampled none)."""

    def __init__(self, path: Sequence[Call], trained: set[str], *, exact: bool) -> None:
        ids, mask, logprobs, versions = [], [], [], []
        self.ends: list[int] = []
        self.length = 0
        for call in path:
            prompt, sampled = unpack_ids(call.prompt_ids), unpack_ids(call.sampled_ids)
            train = exact and call.id not in trained and _trainable(call)
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
    if reward is None:
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
