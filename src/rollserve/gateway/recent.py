"""Token ids that may soon be wanted again: the rollouts of a group begin with the same prompt, and all of a
harness with the same instructions and tools."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from rollserve.records.call import pack_ids
from rollserve.records.ids import Ids


class RecentIds:
    """Ids by what they are of, packed, and with their text where they had one. Beyond ``most`` ids those that
    were not wanted for longest are dropped. Safe in several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._known: dict[Hashable, tuple[bytes, bytes | None]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Ids | None:
        with self._lock:
            kept = self._known.pop(key, None)
            if kept is None:
                return None
            self._known[key] = kept
        packed, text = kept
        return Ids(packed=packed, text=text)

    def put(self, key: Hashable, ids: Ids | list[int]) -> None:
        if len(ids) > self._most:
            return
        kept = (ids.packed, ids.text) if isinstance(ids, Ids) else (pack_ids(ids), None)
        with self._lock:
            self._held += len(ids) - self._drop(key)
            self._known[key] = kept
            while self._held > self._most:
                self._held -= self._drop(next(iter(self._known)))

    def _drop(self, key: Hashable) -> int:
        """How many ids that were."""
        packed, _ = self._known.pop(key, (b"", None))
        return len(packed) // 4
