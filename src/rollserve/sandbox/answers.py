"""Parsing the control pipe: ``payload NUL nonce SP code SP pid NUL``."""

from __future__ import annotations

from dataclasses import dataclass

_OVERLAP = 128


@dataclass(frozen=True)
class Answer:
    """``shell_exited`` when it is the supervisor's word that the shell ended, with ``code``.

    ``payload`` is ``None`` when it was over its limit and was dropped.
    """

    code: int
    pid: int
    payload: bytes | None
    shell_exited: bool


class ControlBuffer:
    """Finds the answers to the expected nonce and of the supervisor (its key) in a byte stream.

    A stream that never answers costs no more memory than the payload limit.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._marks: tuple[bytes, bytes] = (b"", b"")
        self._limit = 0
        self._overflowed = False

    def expect(self, nonce: bytes, *, key: bytes, payload_limit_bytes: int) -> None:
        self._marks = (b"\0" + nonce + b" ", b"\0" + key + b" ")
        self._limit = payload_limit_bytes
        self._overflowed = False
        self._data.clear()

    def feed(self, chunk: bytes) -> list[Answer]:
        search_from = max(0, len(self._data) - _OVERLAP)
        self._data += chunk
        answers = []
        while (answer := self._next(search_from)) is not None:
            answers.append(answer)
            search_from = 0
        if len(self._data) > self._limit + _OVERLAP:
            del self._data[:-_OVERLAP]
            self._overflowed = True
        return answers

    def _next(self, search_from: int) -> Answer | None:
        found = [(at, mark) for mark in self._marks if (at := self._data.find(mark, search_from)) >= 0]
        if not found:
            return None
        at, mark = min(found)
        end = self._data.find(b"\0", at + len(mark))
        if end < 0:
            return None
        words = bytes(self._data[at + len(mark) : end]).split()
        payload = None if self._overflowed or at > self._limit else bytes(self._data[:at])
        del self._data[: end + 1]
        self._overflowed = False
        if len(words) != 2 or not all(word.isdigit() for word in words):
            return None
        exited = mark == self._marks[1]
        return Answer(code=int(words[0]), pid=int(words[1]), payload=payload, shell_exited=exited)
