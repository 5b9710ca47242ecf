"""Parts of one role by name: built in, installed (entry points ``rollserve.<role>s``), or an import path.

What is installed is user code like any other: it runs in a code host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, Protocol, TypeVar

from rollserve.errors import UnknownName
from rollserve.usercode.base import CodeHosts, CodeInfo, Role


class Spec(Protocol):
    """What a task says of a part."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class Entry(Protocol):
    @property
    def check(self) -> Callable[[dict[str, Any]], None]: ...


S = TypeVar("S", bound=Spec, contravariant=True)
E = TypeVar("E", bound=Entry)


class Catalog(ABC, Generic[S, E]):
    """``installed`` maps names to import paths; by default what installed packages declare."""

    def __init__(
        self, role: Role, hosts: CodeHosts, built_in: Mapping[str, E], installed: Mapping[str, str] | None
    ) -> None:
        self._role = role
        self._hosts = hosts
        self._built_in = built_in
        if installed is None:
            installed = {point.name: point.value for point in entry_points(group=f"rollserve.{role.value}s")}
        self._installed = dict(installed)

    @property
    def names(self) -> list[str]:
        return sorted({*self._built_in, *self._installed})

    async def resolve(self, spec: S, *, field: str | None = None) -> E:
        """Raises ``UnknownName`` or ``InvalidInput`` at ``<field>.name``, without one at ``<role>.name``;
        options are not looked at."""
        if (entry := self._built_in.get(spec.name)) is not None:
            return entry
        at = f"{field or self._role.value}.name"
        path = self._installed.get(spec.name, spec.name)
        if ":" not in path:
            raise UnknownName(self._role.value, spec.name, self.names, field=at)
        return self._hosted(spec.name, await self._hosts.describe(path, self._role, field=at))

    async def check(self, spec: S, *, field: str | None = None) -> None:
        """Name and options. Raises ``InvalidInput`` (options: at ``<role>.options.<name>``)."""
        (await self.resolve(spec, field=field)).check(dict(spec.options))

    @abstractmethod
    def _hosted(self, name: str, info: CodeInfo) -> E:
        """The entry of a piece of user code."""
