"""Keys and values of the running batch: one slot (row) per sequence, written at each row's own position.

Sequences sit left-aligned in their slot, so no padding ever stands before a token, and rows of very
different length share a forward pass: a mask hides what lies beyond each row's end. The running batch
always fills slots ``0:n``; a finished sequence's slot is refilled by moving the last one there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_LENGTH_STEP = 128


@dataclass(slots=True)
class Window:
    """Which part of the slots the current forward pass writes and reads: rows ``first:last``, columns
    up to ``end``. ``positions`` holds one column a row (decode); without it all rows write
    ``start:end`` (prefill)."""

    first: int = 0
    last: int = 0
    start: int = 0
    end: int = 0
    positions: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is untyped
    """One attention layer's slots, ``[slots, heads, length, head size]``; grown on demand."""

    def __init__(self, window: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers is untyped
        self.window = window
        self.k = self.v = torch.empty(0)
        self.slots = 0
        self.length = 0

    def reserve(self, slots: int, length: int) -> None:
        """Make room; the layer's tensors are made at its first update, when their shape is known."""
        self.slots, self.length = max(self.slots, slots), max(self.length, length)
        if self.is_initialized and (self.k.shape[0], self.k.shape[2]) != (self.slots, self.length):
            self.k, self.v = self._grown(self.k), self._grown(self.v)

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros(self.slots, old.shape[1], self.length, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.k = self._grown(key_states[:0, :, :0])
        self.v = self._grown(value_states[:0, :, :0])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        if window.positions is not None:
            self.k[window.rows, :, window.positions] = key_states[:, :, 0]
            self.v[window.rows, :, window.positions] = value_states[:, :, 0]
        else:
            self.k[window.first : window.last, :, window.start : window.end] = key_states
            self.v[window.first : window.last, :, window.start : window.end] = value_states
        rows = slice(window.first, window.last)
        return self.k[rows, :, : window.end], self.v[rows, :, : window.end]

    def move(self, source: int, target: int, length: int) -> None:
        self.k[target, :, :length] = self.k[source, :, :length]
        self.v[target, :, :length] = self.v[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.end, 0

    def get_seq_length(self) -> int:
        return self.window.end

    def get_max_length(self) -> int:
        return -1


class SlotCache:
    """All layers' slots. ``hf`` is what the transformers model is given."""

    def __init__(self, layers: int, max_slots: int, max_length: int) -> None:
        self.window = Window()
        self.layers = [SlotLayer(self.window) for _ in range(layers)]
        self.hf = Cache(layers=list(self.layers))
        self._max_slots = max_slots
        self._max_length = max_length
        self._slots = 0
        self._length = 0

    def reserve(self, slots: int, length: int) -> None:
        """Room for ``slots`` rows of ``length`` tokens; grows by doubling, up to the maxima."""
        if slots > self._slots:
            self._slots = min(self._max_slots, max(slots, 2 * self._slots, 8))
        if length > self._length:
            wanted = max(length, self._length * 3 // 2)
            self._length = min(self._max_length, -(-wanted // _LENGTH_STEP) * _LENGTH_STEP)
        for layer in self.layers:
            layer.reserve(self._slots, self._length)

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            layer.move(source, target, length)
