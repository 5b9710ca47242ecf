"""What happened to the fakes of one worker, and where a test has a hand in what they do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Hook = Callable[[], Awaitable[object]]
"""Awaited where a fake would do its work: sleep, hang or raise there."""


class Journal:
    """What happened, in order, over all fakes of one worker."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def __call__(self, entry: str) -> None:
        self.entries.append(entry)

    def index(self, entry: str) -> int:
        return self.entries.index(entry)


async def nothing() -> None:
    return


@dataclass
class Hooks:
    """By point; see where each is awaited."""

    create: Hook = nothing
    adopt: Hook = nothing
    open_session: Hook = nothing
    open_tools: Hook = nothing
    close_tools: Hook = nothing
    chat: Hook = nothing
    stalled: Hook = nothing
    close_session: Hook = nothing
    listen: Hook = nothing
    write_file: Hook = nothing
    open_network: Hook = nothing
    close_sandbox: Hook = nothing
