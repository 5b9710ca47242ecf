"""The contract of what a run's task source reads."""

from __future__ import annotations

from typing import Protocol


class TaskLines(Protocol):
    """The tasks of a source, by index. ``digest`` tells one content from another."""

    lines: int
    digest: str

    def read(self, index: int) -> tuple[str, bytes]:
        """Where it stands (``line 17``), and its JSON. Blocks. Raises ``InvalidInput``."""
