"""The one thing asked of a machine elsewhere: run a shell script to its end and hand back what it printed."""

from __future__ import annotations

from typing import Protocol


class Door(Protocol):
    """To one machine (a container, a pod) that is a sandbox's own."""

    async def call(self, script: str, *, timeout_s: float) -> str:
        """``sh -c script``, stdin empty; its stdout, which is ASCII. Scripts are below 100 kB. Calls may
        overlap, and must be short: some doors let one through at a time. Raises ``SandboxError`` when it
        fails, or does not end in time."""

    async def stop(self) -> None:
        """End the machine; returns when that is confirmed. Idempotent. Raises ``SandboxError``."""
