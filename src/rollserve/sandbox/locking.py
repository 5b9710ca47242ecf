"""Locks of files, which the kernel lets go of when their process ends in any way."""

from __future__ import annotations

import fcntl
import os


def holding(file: int) -> int | None:
    """An open file, once this process holds its lock; closed, and None, where another does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
