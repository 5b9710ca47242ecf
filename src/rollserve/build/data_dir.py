"""Whether the data folder can be used: asked before anything else, which would be blamed for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rollserve.errors import ConfigError


def check_data_dir(data_dir: Path, field: str = "data_dir") -> None:
    """Nothing is made but a file without a name, in the folder or the one it would be made in: rights say
    little where root asks or a mount is read-only. Raises ``ConfigError``."""
    place = whole = data_dir.absolute()
    try:
        place = next(folder for folder in (whole, *whole.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"\0")
    except OSError as error:
        message = f"can't use {data_dir}: nothing can be written in {place}: {error.strerror}"
        raise ConfigError(message, field=field) from error
