"""Arguments and options against their JSON schema: what is wrong, in words that help.

Of JSON schema, what tools use: types, properties, items, enumerations, bounds, alternatives and local
references. A keyword that is not known here asks for nothing; patterns are left to whoever runs the
tool, since a regular expression of a stranger can hang a process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollserve.errors import listed, nearest

MAX_DEPTH = 32
MAX_FAULTS = 8
MAX_STEPS = 20_000
"""Alternatives of alternatives of a stranger's schema would take for ever; what is left is not looked at."""

_BOUNDS: tuple[tuple[str, Callable[[float, float], bool], str], ...] = (
    ("minimum", lambda value, bound: value >= bound, "must be at least"),
    ("maximum", lambda value, bound: value <= bound, "must be at most"),
    ("exclusiveMinimum", lambda value, bound: value > bound, "must be more than"),
    ("exclusiveMaximum", lambda value, bound: value < bound, "must be less than"),
)
_SIZES = (("minLength", "maxLength", "characters"), ("minItems", "maxItems", "items"))


class Fault(NamedTuple):
    """``field`` is the dotted path of the value at fault, empty for the whole."""

    field: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        where = f"`{self.field}`" if self.field else "it"
        return f"{where} {self.message} ({self.hint})" if self.hint else f"{where} {self.message}"


def name_hint(name: str, known: Iterable[str]) -> str:
    """The nearest, or which there are."""
    names = list(known)
    return nearest(name, names) or listed(names)


def json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case _:
            return "object"


def faults(schema: Mapping[str, Any], value: object) -> list[Fault]:
    """What does not fit, ``MAX_FAULTS`` at most."""
    return _Check(schema).faults(schema, value, "", 0)[:MAX_FAULTS]


def lenient(schema: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """With numbers and booleans that were written as text made what the schema wants them to be."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    return {name: _read(properties.get(name), each) for name, each in value.items()}


def _read(schema: object, value: Any) -> Any:
    if not isinstance(value, str) or not isinstance(schema, Mapping):
        return value
    wanted = schema.get("type")
    if wanted not in ("integer", "number", "boolean"):
        return value
    try:
        read = json.loads(value.lower() if wanted == "boolean" else value)
    except ValueError:
        return value
    return read if _is(json_type(read), wanted) else value


def _is(found: str, wanted: object) -> bool:
    names = wanted if isinstance(wanted, list) else [wanted]
    return found in names or (found == "integer" and "number" in names)


class _Check:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps_left = MAX_STEPS

    def faults(self, schema: object, value: object, field: str, depth: int) -> list[Fault]:
        self._steps_left -= 1
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or self._steps_left < 0:
            return [Fault(field, "is not allowed")] if schema is False else []
        schema = self._followed(schema)
        for word in ("anyOf", "oneOf"):
            options = schema.get(word)
            if isinstance(options, list) and options:
                found = [self.faults(option, value, field, depth + 1) for option in options]
                if all(found):
                    return _closest(options, found)
        wanted = schema.get("type")
        if wanted is not None and not _is(json_type(value), wanted):
            return [Fault(field, f"must be {_named(wanted)}, not {json_type(value)}")]
        return self._value(schema, value, field) + self._parts(schema, value, field, depth)

    def _followed(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        for _ in range(MAX_DEPTH):
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return schema
            found: Any = self._root
            for part in reference[2:].split("/"):
                found = found.get(part) if isinstance(found, Mapping) else None
            if not isinstance(found, Mapping):
                return {}
            schema = found
        return {}

    def _value(self, schema: Mapping[str, Any], value: object, field: str) -> list[Fault]:
        enum = schema.get("enum")
        if isinstance(enum, list) and value not in enum:
            names = [each for each in enum if isinstance(each, str)]
            hint = name_hint(value, names) if isinstance(value, str) and names else None
            return [Fault(field, f"must be one of {json.dumps(enum)}", hint)]
        if "const" in schema and value != schema["const"]:
            return [Fault(field, f"must be {json.dumps(schema['const'])}")]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _out_of_bounds(schema, value, field)
        if isinstance(value, str | list):
            return _out_of_size(schema, len(value), _SIZES[isinstance(value, list)], field)
        return []

    def _parts(self, schema: Mapping[str, Any], value: object, field: str, depth: int) -> list[Fault]:
        if isinstance(value, Mapping):
            return self._fields(schema, value, field, depth)
        if isinstance(value, list | tuple) and "items" in schema:
            found: list[Fault] = []
            for index, each in enumerate(value):
                found += self.faults(schema["items"], each, _joined(field, str(index)), depth + 1)
                if len(found) >= MAX_FAULTS:
                    break
            return found
        return []

    def _fields(
        self, schema: Mapping[str, Any], value: Mapping[str, Any], field: str, depth: int
    ) -> list[Fault]:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        rest = schema.get("additionalProperties", True)
        found: list[Fault] = []
        for name, each in value.items():
            if name not in properties and rest is False:
                found.append(Fault(_joined(field, name), "is not known", name_hint(name, properties)))
            else:
                found += self.faults(properties.get(name, rest), each, _joined(field, name), depth + 1)
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if name not in value:
                wanted = self._followed(properties[name]).get("type") if name in properties else None
                kind = None if wanted is None else _named(wanted)
                found.append(Fault(_joined(field, str(name)), "is required", kind))
        return found


def _closest(options: Sequence[object], found: list[list[Fault]]) -> list[Fault]:
    """What is wrong by the alternative that is nearest; that it is not null says nothing."""
    pairs = [pair for pair in zip(options, found, strict=True) if pair[0] != {"type": "null"}]
    return min((each for _, each in pairs), key=len, default=found[0])


def _out_of_bounds(schema: Mapping[str, Any], value: float, field: str) -> list[Fault]:
    for word, holds, said in _BOUNDS:
        bound = schema.get(word)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and not holds(value, bound):
            return [Fault(field, f"{said} {bound:g}")]
    return []


def _out_of_size(
    schema: Mapping[str, Any], size: int, words: tuple[str, str, str], field: str
) -> list[Fault]:
    least, most = schema.get(words[0]), schema.get(words[1])
    if isinstance(least, int) and size < least:
        return [Fault(field, f"must have at least {least} {words[2]}")]
    if isinstance(most, int) and size > most:
        return [Fault(field, f"must have at most {most} {words[2]}")]
    return []


def _joined(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _named(wanted: object) -> str:
    return " or ".join(map(str, wanted)) if isinstance(wanted, list) else str(wanted)
