"""Durations as people write them: ``45m``, ``2h``, ``1h05``."""

import re

_WRITTEN = re.compile(r"(?:(\d+)h)?(?:(\d+)m?)?")


def minutes(text: str) -> int:
    """Raises ``ValueError``."""
    match = _WRITTEN.fullmatch(text)
    if match is None or not text or text.isdigit():
        raise ValueError(f"{text!r} is no duration")
    return 60 * int(match[1] or 0) + int(match[2] or 0)


def written(total: int) -> str:
    hours, rest = divmod(total, 60)
    return f"{hours}h{rest:02d}"
