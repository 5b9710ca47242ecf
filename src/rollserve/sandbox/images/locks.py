"""Locks of the image cache: kept by the kernel for as long as the process that holds them lives."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollserve.sandbox.images.base import Job

_PAUSE_S = 0.05


def try_lock(path: Path, *, shared: bool) -> int | None:
    """A descriptor that holds the lock until it is closed; None while others hold it, or when the file was
    removed meanwhile. Raises ``FileNotFoundError``."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


@contextmanager
def holding(path: Path, *, shared: bool, job: Job) -> Iterator[None]:
    """Wait for the lock of ``path``, made where it is missing; ends with ``job``."""
    while True:
        path.touch(mode=0o600)
        fd = try_lock(path, shared=shared)
        if fd is not None:
            break
        job.check()
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        os.close(fd)
