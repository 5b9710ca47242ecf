"""Token ids that may soon be wanted again: the rollouts of a group begin with the same prompt, and all of a
harness with the same instructions and tools."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Hashable, Sequence


class RecentIds:
    """Ids by what they are of. Beyond ``most`` ids those that were not wanted for longest are dropped. Safe
    in several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._known: dict[Hashable, array[int]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> list[int] | None:
        with self._lock:
            ids = self._known.pop(key, None)
            if ids is None:
                return None
            self._known[key] = ids
            return ids.tolist()

    def put(self, key: Hashable, ids: Sequence[int]) -> None:
        if len(ids) > self._most:
            return
        kept = array("i", ids)
        with self._lock:
            self._held += len(kept) - len(self._known.pop(key, ()))
            self._known[key] = kept
            while self._held > self._most:
                self._held -= len(self._known.pop(next(iter(self._known))))
