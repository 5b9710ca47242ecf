"""A grader of the user's, ``package.module:function``: run in a code host, where it can be killed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from rollserve.errors import GraderFailure, InfrastructureFailure, RollserveError
from rollserve.grader.base import Grade, Grading, check_grade
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeHosts, CodeInfo, Use
from rollserve.usercode.options import check_arguments, parse_options
from rollserve.usercode.serving import model_handlers, sandbox_handlers

FIELD = "grader.options"


class PythonGraderOptions(BaseModel):
    """Ours; every other option is passed to the function by name. ``carry``: it wants a sandbox, with
    these paths of the run sandbox in it. ``timeout_s``: None leaves it to the task's ``grade_s``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    carry: Annotated[list[Annotated[str, Field(min_length=1)]] | None, Field(max_length=100)] = None
    timeout_s: Annotated[float | None, Field(gt=0, le=86400)] = None


def split_options(options: Mapping[str, Any]) -> tuple[PythonGraderOptions, dict[str, Any]]:
    """Ours and the function's. Raises ``InvalidInput``."""
    ours = {name: value for name, value in options.items() if name in PythonGraderOptions.model_fields}
    theirs = {name: value for name, value in options.items() if name not in ours}
    return parse_options(PythonGraderOptions, ours, field=FIELD), theirs


class PythonGrader:
    """Whatever goes wrong in the function is a grader failure."""

    def __init__(self, hosts: CodeHosts, info: CodeInfo, options: Mapping[str, Any]) -> None:
        self._hosts = hosts
        self._info = info
        self._path = info.path
        self._ours, theirs = split_options(options)
        check_arguments(info.parameters, theirs, field=FIELD)
        self._options_json = msgspec.json.encode(theirs)
        self.carry = None if self._ours.carry is None else tuple(self._ours.carry)

    async def grade(self, grading: Grading) -> Grade:
        operation = f"grader {self._path}"
        sandbox = grading.sandbox
        order = params.RunGrader(
            path=self._path,
            options_json=self._options_json,
            task_json=grading.task.model_dump_json().encode(),
            answer=grading.answer,
            conversation=tuple(grading.conversation),
            call_ids=tuple(grading.call_ids),
            sandbox_id=None if sandbox is None else sandbox.id,
            has_model=grading.model is not None,
        )
        handlers = {} if sandbox is None else sandbox_handlers(sandbox)
        if grading.model is not None:
            handlers = {**handlers, **model_handlers(grading.model)}
        async with self._hosts.open(
            Use.LEAF, handlers=handlers, log=grading.log, pause=grading.pause, code=(self._info,)
        ) as host:
            try:
                grade = await host.call("grade", order, Grade, timeout_s=self._ours.timeout_s)
            except CodeFault as fault:
                raise GraderFailure(fault.report, operation=operation) from fault
            except (InfrastructureFailure, GraderFailure):
                raise
            except RollserveError as error:
                raise GraderFailure(str(error), operation=operation) from error
        return check_grade(grade, grading.call_ids, operation=operation)
