"""Checking options and arguments without running the code they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollserve.errors import InvalidInput

M = TypeVar("M", bound=BaseModel)


def parse_options(model: type[M], options: Mapping[str, Any], *, field: str) -> M:
    """``options`` as ``model``. Raises ``InvalidInput`` at ``field.<name>`` for the first at fault."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            hint = nearest(where, model.model_fields)
            raise InvalidInput("unknown option", field=f"{field}.{where}", hint=hint) from None
        raise InvalidInput(first["msg"], field=f"{field}.{where}" if where else field) from None


def nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"


def check_arguments(schema: Mapping[str, Any], values: Mapping[str, Any], *, field: str) -> None:
    """A quick look, without the user's code, at whether ``values`` fit: names, what is required, and
    the JSON type at the top. Raises ``InvalidInput`` at ``field.<name>``."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    for name, value in values.items():
        if name in properties:
            if not _fits(properties[name], value):
                kind = properties[name].get("type", "one of its types")
                raise InvalidInput(f"must be {kind}, not {_json_type(value)}", field=f"{field}.{name}")
        elif schema.get("additionalProperties") is False:
            raise InvalidInput("unknown option", field=f"{field}.{name}", hint=nearest(name, properties))
    for name in schema.get("required", ()):
        if name not in values:
            raise InvalidInput("is required", field=f"{field}.{name}")


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case _:
            return "object"


def _fits(schema: Mapping[str, Any], value: object) -> bool:
    if "anyOf" in schema:
        return any(_fits(option, value) for option in schema["anyOf"])
    wanted = schema.get("type")
    if wanted is None:
        return True
    found = _json_type(value)
    return found in wanted or (found == "integer" and "number" in wanted)
