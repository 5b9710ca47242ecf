"""Checking options and arguments without running the code they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollserve.errors import InvalidInput
from rollserve.usercode.schema import faults, name_hint

M = TypeVar("M", bound=BaseModel)


def parse_options(model: type[M], options: Mapping[str, Any], *, field: str) -> M:
    """``options`` as ``model``. Raises ``InvalidInput`` at ``field.<name>`` for the first at fault: an
    unknown one before others, as a typo in its name explains a missing one."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            hint = name_hint(where, model.model_fields)
            raise InvalidInput("unknown option", field=f"{field}.{where}", hint=hint) from None
        raise InvalidInput(first["msg"], field=f"{field}.{where}" if where else field) from None


def check_arguments(schema: Mapping[str, Any], values: Mapping[str, Any], *, field: str) -> None:
    """A look, without the user's code, at whether ``values`` fit. Raises ``InvalidInput`` at
    ``field.<name>``."""
    for fault in faults(schema, values):
        raise InvalidInput(fault.message, field=f"{field}.{fault.field}", hint=fault.hint)
