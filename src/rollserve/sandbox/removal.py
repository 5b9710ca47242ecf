"""Whole trees, removed whatever modes were set in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def remove_tree(folder: Path) -> None:
    """Blocking; nothing where there is none. Modes may be those of an overlay's work folder."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except PermissionError:
        _open_up(folder)
        shutil.rmtree(folder)


def _open_up(folder: Path) -> None:
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        place.chmod(0o700)
        with os.scandir(place) as entries:
            waiting += [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
