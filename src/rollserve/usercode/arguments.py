"""From a Python signature to what may be passed by name: a JSON schema, and a validating model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from rollserve.errors import InvalidInput
from rollserve.usercode.schema import name_hint

_ENTRY = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


def argument_model(function: Callable[..., Any], *, skip: int = 0) -> type[BaseModel]:
    """A model of the parameters after the first ``skip`` positional ones. Fields are called ``a0``,
    ``a1``, …, with the parameter's name as their alias (a parameter may be called ``json`` or
    ``_x``, which a field can't). Raises ``TypeError`` for a parameter that can't be passed by name."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    hints = _hints(function)
    notes = parameter_notes(function)
    fields: dict[str, Any] = {}
    extra: Any = "forbid"
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise TypeError(f"parameter {str(parameter)!r} can't be passed by name")
        default = ... if parameter.default is parameter.empty else parameter.default
        info = Field(default, alias=parameter.name, description=notes.get(parameter.name))
        fields[f"a{index}"] = (hints.get(parameter.name, Any), info)
    config = ConfigDict(extra=extra, arbitrary_types_allowed=True, protected_namespaces=())
    return create_model("Arguments", __config__=config, **fields)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function.__init__ if inspect.isclass(function) else function
    if not (inspect.isroutine(target) or inspect.isfunction(target)):
        target = type(function).__call__
    return get_type_hints(target, include_extras=True)


def parameters_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of ``model``, without pydantic's titles. Raises ``TypeError`` when a type has
    none."""
    try:
        schema = model.model_json_schema(by_alias=True)
    except Exception as error:  # pydantic raises several classes here; all mean this
        raise TypeError(f"no JSON schema can be made of its parameters: {error}") from error
    schema.pop("title", None)
    schema.setdefault("properties", {})
    for item in schema["properties"].values():
        item.pop("title", None)
    return schema


def bind(model: type[BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Validate and convert; what was not given is left to the function's own default. Raises
    ``InvalidInput`` with the parameter as field."""
    try:
        values = model.model_validate(dict(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = [info.alias or name for name, info in model.model_fields.items()]
            raise InvalidInput("unknown argument", field=where, hint=name_hint(where, known)) from None
        raise InvalidInput(first["msg"], field=where) from None
    bound = {
        info.alias or name: getattr(values, name)
        for name, info in model.model_fields.items()
        if name in values.model_fields_set
    }
    return {**bound, **(values.model_extra or {})}


def summary(function: Callable[..., Any]) -> str:
    """The docstring up to its first section (``Args:``, ``Returns:``, …)."""
    text = inspect.getdoc(function) or ""
    return re.split(r"\n\s*(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?)\s*:?\s*\n", text)[
        0
    ].strip()


def parameter_notes(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring's ``Args:`` section says of each parameter."""
    lines = (inspect.getdoc(function) or "").splitlines()
    notes: dict[str, str] = {}
    inside, name, indent = False, "", 0
    for line in lines:
        if re.fullmatch(r"\s*(Args|Arguments)\s*:", line):
            inside, indent = True, len(line) - len(line.lstrip())
        elif inside and line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        elif inside and (entry := _ENTRY.match(line)):
            name = entry[1]
            notes[name] = entry[2].strip()
        elif inside and name and line.strip():
            notes[name] += f" {line.strip()}"
    return notes
