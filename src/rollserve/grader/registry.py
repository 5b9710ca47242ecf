"""Graders by name: built in, installed (entry points ``rollserve.graders``), or an import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import BaseModel

from rollserve.errors import UnknownName
from rollserve.grader.base import Grader, GraderEntry
from rollserve.grader.command import CommandGrader, CommandOptions
from rollserve.grader.exact import ExactGrader, ExactOptions
from rollserve.grader.math import MathGrader, MathOptions, check_installed
from rollserve.grader.numeric import NumericGrader, NumericOptions
from rollserve.grader.python import FIELD, PythonGrader
from rollserve.records.task import GraderSpec
from rollserve.usercode.base import CodeHosts, CodeInfo, Role
from rollserve.usercode.options import parse_options

ENTRY_POINTS = "rollserve.graders"
M = TypeVar("M", bound=BaseModel)


def _entry(name: str, model: type[M], make: Callable[[M], Grader]) -> GraderEntry:
    def check(options: dict[str, Any]) -> None:
        parse_options(model, options, field=FIELD)

    return GraderEntry(
        name=name, make=lambda options: make(parse_options(model, options, field=FIELD)), check=check
    )


def _math(hosts: CodeHosts) -> GraderEntry:
    def check(options: dict[str, Any]) -> None:
        check_installed()
        parse_options(MathOptions, options, field=FIELD)

    def make(options: dict[str, Any]) -> Grader:
        check_installed()
        return MathGrader(hosts, parse_options(MathOptions, options, field=FIELD))

    return GraderEntry(name="math", make=make, check=check)


def built_in(hosts: CodeHosts) -> dict[str, GraderEntry]:
    """Graders of our own. A new one is a line here."""
    entries = (
        _entry("exact", ExactOptions, ExactGrader),
        _entry("numeric", NumericOptions, NumericGrader),
        _math(hosts),
        _entry("command", CommandOptions, CommandGrader),
    )
    return {entry.name: entry for entry in entries}


class GraderCatalog:
    """``installed`` maps names to import paths; by default what installed packages declare."""

    def __init__(self, hosts: CodeHosts, *, installed: Mapping[str, str] | None = None) -> None:
        self._hosts = hosts
        self._built_in = built_in(hosts)
        if installed is None:
            installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
        self._installed = dict(installed)

    @property
    def names(self) -> list[str]:
        return sorted({*self._built_in, *self._installed})

    async def resolve(self, spec: GraderSpec, *, field: str = "grader") -> GraderEntry:
        """Raises ``UnknownName`` or ``InvalidInput`` at ``<field>.name``; options are not looked at."""
        if (entry := self._built_in.get(spec.name)) is not None:
            return entry
        path = self._installed.get(spec.name, spec.name)
        if ":" not in path:
            raise UnknownName("grader", spec.name, self.names, field=f"{field}.name")
        info = await self._hosts.describe(path, Role.GRADER, field=f"{field}.name")
        return self._hosted(spec.name, info)

    async def check(self, spec: GraderSpec, *, field: str = "grader") -> None:
        """Name and options. Raises ``InvalidInput`` (options: at ``grader.options.<name>``)."""
        (await self.resolve(spec, field=field)).check(dict(spec.options))

    def _hosted(self, name: str, info: CodeInfo) -> GraderEntry:
        def make(options: dict[str, Any]) -> Grader:
            return PythonGrader(self._hosts, info, options)

        def check(options: dict[str, Any]) -> None:
            make(options)

        return GraderEntry(name=name, make=make, check=check, code={info.path: info.version})
