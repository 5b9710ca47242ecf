"""Curricula of the user's, ``package.module:function``: asked in a code host, where they can be killed."""

from __future__ import annotations

from typing import Any

import msgspec

from rollserve.errors import ConfigError
from rollserve.usercode import params
from rollserve.usercode.base import CodeHosts, Role, Use

TIMEOUT_S = 30.0
"""For one answer."""


def _ignore(_: str) -> None:
    """What a curriculum prints is nobody's."""


class HostedCurriculum:
    def __init__(self, hosts: CodeHosts) -> None:
        self._hosts = hosts

    async def next_tasks(self, path: str, arguments: dict[str, Any]) -> list[int | dict[str, Any]] | None:
        """Lines of the source by number, or tasks; None when there are no more. Raises ``CodeFault``;
        ``ConfigError`` for an answer that is neither; ``InvalidInput`` when the function is there no more."""
        info = await self._hosts.describe(path, Role.ANY, field="curriculum")
        order = params.RunFunction(path=path, arguments_json=msgspec.json.encode(arguments))
        async with self._hosts.open(Use.LEAF, handlers={}, log=_ignore, code=(info,)) as host:
            answer = await host.call("function", order, params.Json, timeout_s=TIMEOUT_S)
        try:
            return msgspec.json.decode(answer.data, type=list[int | dict[str, Any]] | None)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{path} returned something else than numbers of lines and tasks, or None: {error}"
            ) from error
