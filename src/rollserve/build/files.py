"""Files of a task that no sandbox could hold: refused before one is opened."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from pathlib import PurePosixPath

from rollserve.errors import InvalidInput


def check_files(paths: Iterable[str]) -> None:
    """Raises ``InvalidInput`` at ``files.<path>`` where another of ``paths`` is a folder above it. Relative
    and absolute ones are apart: which folder is worked in is the image's to say."""
    named = {posixpath.normpath(path): path for path in paths}
    for normal, path in named.items():
        for parent in PurePosixPath(normal).parents:
            if (above := named.get(str(parent))) is not None:
                raise InvalidInput(f"{above!r} is a file, and can't be a folder too", field=f"files.{path}")
