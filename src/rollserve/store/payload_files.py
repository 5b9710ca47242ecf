"""Payloads in files beside the database: ``<root>/<run>/<attempt>.live`` while the attempt runs, one
packed ``<attempt>.rsp`` afterwards.

Appending is a single write to the operating system, so that it survives the death of the process; a
sealed file is on the disk, under its name, before ``seal`` returns. Files are read, packed and unpacked
in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rollserve.errors import Conflict, InfrastructureFailure, InvalidInput, NotFound
from rollserve.records.call import Call
from rollserve.store.packing import (
    ArtifactFrame,
    CallFrame,
    Damaged,
    EndFrame,
    Frame,
    LogFrame,
    RewardsFrame,
    encode_frame,
    gather,
    pack,
    unpack,
)
from rollserve.store.payload import AttemptPayload, EndState, SealedPayload

LIVE = ".live"
SEALED = ".rsp"
TEMPORARY = ".tmp"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REF = re.compile(rf"({_ID.pattern})/({_ID.pattern}){re.escape(SEALED)}")


class FilePayloadStore:
    """``fsync`` False leaves it to the operating system when a sealed file reaches the disk: it then
    survives the death of processes, not of the machine. ``clock`` gives seconds since the epoch."""

    def __init__(self, root: Path, *, fsync: bool = True, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._fsync = fsync
        self._clock = clock

    def open_segment(self, run_id: str, attempt_id: str) -> FileSegment:
        """Raises ``Conflict`` when the attempt has one already, ``InvalidInput`` for an id that is no
        name, ``InfrastructureFailure`` when the disk refuses."""
        stem = self._stem(run_id, attempt_id)
        return FileSegment(stem, f"{run_id}/{attempt_id}{SEALED}", fsync=self._fsync, clock=self._clock)

    async def read(self, ref: str) -> AttemptPayload:
        """Raises ``NotFound``; ``InfrastructureFailure`` when the file is damaged."""
        path = self._sealed(ref)
        return await asyncio.to_thread(_read_sealed, path, ref)

    async def read_live(self, run_id: str, attempt_id: str) -> AttemptPayload:
        """Any process may be writing. What has been sealed meanwhile is read as sealed."""
        stem = self._stem(run_id, attempt_id)
        return await asyncio.to_thread(_read_live, stem, f"{run_id}/{attempt_id}{SEALED}")

    async def salvage(self, run_id: str, attempt_id: str) -> SealedPayload | None:
        """A worker that is not quite dead may still write to the file, but no longer finds its name."""
        stem = self._stem(run_id, attempt_id)
        ref = f"{run_id}/{attempt_id}{SEALED}"
        return await asyncio.to_thread(_salvage, stem, ref, self._fsync)

    async def delete(self, refs: Sequence[str]) -> None:
        """What is not there is no error."""
        await asyncio.to_thread(_delete, [self._sealed(ref) for ref in refs])

    async def sweep(self, known: set[str]) -> int:
        """Only while no worker runs: every live segment counts as a dead attempt's."""
        return await asyncio.to_thread(_sweep, self._root, known)

    def _stem(self, run_id: str, attempt_id: str) -> Path:
        for field, value in (("run_id", run_id), ("attempt_id", attempt_id)):
            if not _ID.fullmatch(value):
                raise InvalidInput(f"{value!r} is no identifier", field=field)
        return self._root / run_id / attempt_id

    def _sealed(self, ref: str) -> Path:
        match = _REF.fullmatch(ref)
        if match is None:
            raise NotFound(f"{ref!r} is no payload of this store", field="ref")
        return self._root / match[1] / f"{match[2]}{SEALED}"


class FileSegment:
    """The live record of one attempt. Appending raises ``Conflict`` once it is sealed or discarded,
    ``InfrastructureFailure`` when the disk refuses; then nothing of the frame remains."""

    def __init__(self, stem: Path, ref: str, *, fsync: bool, clock: Callable[[], float]) -> None:
        self._stem = stem
        self._ref = ref
        self._fsync = fsync
        self._clock = clock
        self._live = stem.with_name(stem.name + LIVE)
        self._size = 0
        self._fd: int | None = self._create()

    def _create(self) -> int:
        with _disk("payload.open"):
            try:
                return self._open_new()
            except FileNotFoundError:  # the folder was empty, and dropped just then
                return self._open_new()

    def _open_new(self) -> int:
        self._live.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(self._live, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
        except FileExistsError as error:
            raise Conflict(f"attempt {self._stem.name} has a segment already") from error

    def append_call(self, call: Call) -> None:
        self._append(CallFrame(call))

    def append_log(self, line: str) -> None:
        self._append(LogFrame(self._clock(), line))

    def append_artifact(self, path: str, data: bytes) -> None:
        self._append(ArtifactFrame(path, data))

    def append_call_rewards(self, rewards: dict[str, float]) -> None:
        self._append(RewardsFrame(rewards))

    def append_end(self, end: EndState) -> None:
        self._append(EndFrame(end))

    def _append(self, frame: Frame) -> None:
        if self._fd is None:
            raise Conflict(f"the record of attempt {self._stem.name} is closed")
        data = encode_frame(frame)
        with _disk("payload.append"):
            try:
                _write_all(self._fd, data)
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
        self._size += len(data)

    async def seal(self) -> SealedPayload:
        if self._fd is None:
            raise Conflict(f"the record of attempt {self._stem.name} is closed")
        fd, self._fd = self._fd, None
        try:
            return await asyncio.to_thread(self._seal)
        finally:
            os.close(fd)

    def _seal(self) -> SealedPayload:
        with _disk("payload.seal"):
            payload, whole = gather(self._live.read_bytes())
            if whole != self._size:
                raise InfrastructureFailure(
                    f"{self._size - whole} bytes of the record of {self._stem.name} are lost",
                    operation="payload.seal",
                )
            size_bytes = _keep(self._stem, pack(payload), fsync=self._fsync)
            self._live.unlink()
        return SealedPayload(ref=self._ref, size_bytes=size_bytes)

    def leave(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def discard(self) -> None:
        """Also of what a seal that failed has left."""
        self.leave()
        self._live.unlink(missing_ok=True)
        self._stem.with_name(self._stem.name + TEMPORARY).unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(operation: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InfrastructureFailure(f"the disk refused: {error}", operation=operation) from error


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write_file(path: Path, data: bytes, *, fsync: bool) -> None:
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        _write_all(fd, data)
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _keep(stem: Path, data: bytes, *, fsync: bool) -> int:
    """Under its sealed name, whole or not at all; its size in bytes."""
    temporary = stem.with_name(stem.name + TEMPORARY)
    _write_file(temporary, data, fsync=fsync)
    temporary.replace(stem.with_name(stem.name + SEALED))
    if fsync:
        _sync_folder(stem.parent)
    return len(data)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_sealed(path: Path, ref: str) -> AttemptPayload:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFound(f"payload {ref!r} is gone: it was pruned", field="ref") from error
    try:
        return unpack(data)
    except Damaged as error:
        raise InfrastructureFailure(
            f"payload {ref!r} is damaged: {error}", operation="payload.read"
        ) from error


def _read_live(stem: Path, ref: str) -> AttemptPayload:
    try:
        return gather(stem.with_name(stem.name + LIVE).read_bytes())[0]
    except FileNotFoundError:
        sealed = stem.with_name(stem.name + SEALED)
        return _read_sealed(sealed, ref) if sealed.exists() else AttemptPayload()


def _salvage(stem: Path, ref: str, fsync: bool) -> SealedPayload | None:
    live, sealed = stem.with_name(stem.name + LIVE), stem.with_name(stem.name + SEALED)
    with _disk("payload.salvage"):
        if sealed.exists():
            live.unlink(missing_ok=True)
            return SealedPayload(ref=ref, size_bytes=sealed.stat().st_size)
        try:
            payload, _ = gather(live.read_bytes())
        except FileNotFoundError:
            return None
        if payload == AttemptPayload():
            live.unlink(missing_ok=True)
            return None
        size_bytes = _keep(stem, pack(payload), fsync=fsync)
        live.unlink(missing_ok=True)
    return SealedPayload(ref=ref, size_bytes=size_bytes)


def _delete(paths: Sequence[Path]) -> None:
    with _disk("payload.delete"):
        for path in paths:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths}:
            _drop_empty(folder)


def _sweep(root: Path, known: set[str]) -> int:
    removed = 0
    with _disk("payload.sweep"):
        for folder in [path for path in root.glob("*") if path.is_dir() and not path.is_symlink()]:
            for path in list(folder.iterdir()):
                ours = path.suffix in (LIVE, TEMPORARY, SEALED)
                if ours and f"{folder.name}/{path.name}" not in known:
                    path.unlink()
                    removed += 1
            _drop_empty(folder)
    return removed


def _drop_empty(folder: Path) -> None:
    """Races with a segment being opened in it end well: a folder in use is not empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()
