"""The user's code as it was loaded at one time: the zygote that holds it, and what is known of it."""

from __future__ import annotations

from rollserve.usercode.base import CodeInfo, Role, Stamp
from rollserve.usercode.sources import stamp_of
from rollserve.usercode.zygote_client import ZygoteClient


class Generation:
    """``files`` are the sources loaded from the folder of code, as they were when they were first loaded:
    what a later import finds on the disk is not what the zygote holds. ``unfit``: import paths that brought
    a zygote to its end, which hosts import themselves."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.zygote: ZygoteClient | None = None
        self.known: dict[tuple[str, Role], CodeInfo] = {}
        self.files: dict[str, Stamp | None] = {}
        self.unfit: set[str] = set()

    @property
    def live(self) -> int:
        """How many host processes there are."""
        return 0 if self.zygote is None else len(self.zygote.hosts)

    def learn(self, info: CodeInfo) -> bool:
        """Whether ``info`` is of the files as this generation knows them, or is the first to know them."""
        return all(self.files.setdefault(path, stamp) == stamp for path, stamp in info.files.items())

    def changed(self) -> list[str]:
        """The files that are no longer what was loaded. Blocking."""
        return [path for path, stamp in list(self.files.items()) if stamp_of(path) != stamp]

    async def close(self) -> None:
        if self.zygote is not None:
            await self.zygote.close()
