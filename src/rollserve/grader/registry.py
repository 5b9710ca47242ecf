"""Graders by name: built in, installed (entry points ``rollserve.graders``), or an import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from rollserve.grader.base import Grader, GraderEntry
from rollserve.grader.command import CommandGrader, CommandOptions
from rollserve.grader.exact import ExactGrader, ExactOptions
from rollserve.grader.math import MathGrader, MathOptions, check_installed
from rollserve.grader.numeric import NumericGrader, NumericOptions
from rollserve.grader.python import FIELD, PythonGrader
from rollserve.records.task import GraderSpec
from rollserve.usercode.base import CodeHosts, CodeInfo, Role
from rollserve.usercode.catalog import Catalog
from rollserve.usercode.options import parse_options

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


class GraderCatalog(Catalog[GraderSpec, GraderEntry]):
    def __init__(self, hosts: CodeHosts, *, installed: Mapping[str, str] | None = None) -> None:
        super().__init__(Role.GRADER, hosts, built_in(hosts), installed)

    def _hosted(self, name: str, info: CodeInfo) -> GraderEntry:
        def make(options: dict[str, Any]) -> Grader:
            return PythonGrader(self._hosts, info, options)

        def check(options: dict[str, Any]) -> None:
            make(options)

        return GraderEntry(name=name, make=make, check=check, code={info.path: info.version})
