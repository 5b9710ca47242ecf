"""The contract of what an update of the weights asks of an inference server: pause, go on, and serve under a
new label. The weights themselves are the trainer's to bring there, its own way. ``engine_control`` has one
small class an engine."""

from __future__ import annotations

from typing import Protocol

from rollserve.records.update import UpdateMode


class Control(Protocol):
    """``waits``: a pause to *drain* returns when nothing is in flight any more; else the workers tell. All
    but ``check`` raise ``BackendError`` (``BackendUnavailable`` where the server does not answer)."""

    waits: bool

    async def check(self, mode: UpdateMode) -> str:
        """What the trainer should know, or an empty text. Raises ``InvalidInput``, field ``mode`` or
        ``backends``, where the server can't be updated so."""

    async def pause(self, mode: UpdateMode, within_s: float) -> None:
        """Returns once the pause is in force. Harmless when repeated."""

    async def announce(self, label: str, adapter_path: str | None = None) -> None:
        """Sample under this label from now on, and forget every cached prefix. The server is paused. With
        ``adapter_path`` a server whose model is an adapter takes it from there; others are not given one."""

    async def resume(self) -> None:
        """Harmless when it is not paused."""

    async def close(self) -> None: ...
