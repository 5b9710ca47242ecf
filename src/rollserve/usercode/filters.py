"""Filters of the user's, ``package.module:function``: run in a code host, where they can be killed."""

from __future__ import annotations

from typing import Any

import msgspec

from rollserve.errors import ConfigError
from rollserve.usercode import params
from rollserve.usercode.base import CodeHosts, Role, Use

TIMEOUT_S = 30.0
"""For one group."""


def _ignore(_: str) -> None:
    """What a filter prints is nobody's."""


class HostedFilters:
    def __init__(self, hosts: CodeHosts) -> None:
        self._hosts = hosts

    async def check(self, path: str, field: str) -> None:
        """Raises ``InvalidInput`` with ``field`` when there is no such function."""
        await self._hosts.describe(path, Role.ANY, field=field)

    async def keeps(self, path: str, arguments: dict[str, Any]) -> bool:
        """Whether the function wants the group. Raises ``CodeFault``; ``ConfigError`` for an answer that
        is no bool; ``InvalidInput`` when the function is there no more."""
        info = await self._hosts.describe(path, Role.ANY, field="filter")
        order = params.RunFunction(path=path, arguments_json=msgspec.json.encode(arguments))
        async with self._hosts.open(Use.LEAF, handlers={}, log=_ignore, code=(info,)) as host:
            answer = await host.call("function", order, params.Json, timeout_s=TIMEOUT_S)
        value = msgspec.json.decode(answer.data)
        if not isinstance(value, bool):
            raise ConfigError(f"{path} returned {type(value).__name__}; a filter returns true or false")
        return value
