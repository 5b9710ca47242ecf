"""Token ids in the forms that a call needs of them: numbers, packed bytes, and the text by which an engine
gets them.

A conversation's ids are sent whole with each of its calls, and only a few of them are new: what stood before
keeps its bytes and its text, so that a call costs what it adds. Few ask for the numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from rollserve.records.call import pack_ids


class Ids(Sequence[int]):
    """Never changes, nor does its ``list``. ``packed`` is as ``records.call`` packs, ``text`` the numbers as
    JSON writes them, with commas and without brackets. Each form is made when it is first asked for."""

    __slots__ = ("_list", "_packed", "_text")

    def __init__(
        self, ids: list[int] | None = None, *, packed: bytes | None = None, text: bytes | None = None
    ) -> None:
        self._list = [] if ids is None and packed is None else ids
        self._packed = packed
        self._text = text

    @classmethod
    def joined(cls, *parts: Ids) -> Ids:
        """One after another."""
        packed = b"".join([part.packed for part in parts])
        return cls(packed=packed, text=b",".join([part.text for part in parts if part]))

    def made(self) -> Ids:
        """With its bytes and its text: those of many ids take as long as a call, and belong in a thread."""
        self._packed, self._text = self.packed, self.text
        return self

    @property
    def list(self) -> list[int]:
        if self._list is None:
            self._list = array("i", self._packed or b"").tolist()
        return self._list

    @property
    def packed(self) -> bytes:
        if self._packed is None:
            self._packed = pack_ids(self.list)
        return self._packed

    @property
    def text(self) -> bytes:
        if self._text is None:
            self._text = msgspec.json.encode(self.list)[1:-1]
        return self._text

    def __len__(self) -> int:
        return len(self._packed) // 4 if self._list is None and self._packed else len(self.list)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return self.list[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self.list)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return self.packed == other.packed
        return self.list == other if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return f"Ids({self.list})"


def with_ids(document: bytes, name: bytes, ids: Sequence[int]) -> bytes:
    """A JSON object that has members, with one more: the ids, copied once."""
    text = ids.text if isinstance(ids, Ids) else msgspec.json.encode(ids)[1:-1]
    return b"".join((document[:-1], b',"', name, b'":[', text, b"]}"))
