"""Google's schemas as JSON schema: upper-case types, ``nullable``, numbers as text, snake_case keywords.

A JSON schema comes out as it went in (Gemini CLI writes upper-case types into those, too).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_KEYWORDS = {
    "any_of": "anyOf",
    "additional_properties": "additionalProperties",
    "max_items": "maxItems",
    "min_items": "minItems",
    "max_length": "maxLength",
    "min_length": "minLength",
    "max_properties": "maxProperties",
    "min_properties": "minProperties",
    "property_ordering": "propertyOrdering",
}
_COUNTS = frozenset({"maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties"})
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "defs"})
_SCHEMAS = frozenset(
    {"items", "anyOf", "allOf", "oneOf", "prefixItems", "not", "if", "then", "else", "contains"}
    | {"additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"}
)


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Recursive: the caller has checked how deep ``schema`` is."""
    made: dict[str, Any] = {}
    for given, value in schema.items():
        keyword = _KEYWORDS.get(given, given)
        made[keyword] = _value(keyword, value)
    if made.get("nullable") is True and isinstance(made.get("type"), str):
        del made["nullable"]
        made["type"] = [made["type"], "null"]
    return made


def _value(keyword: str, value: Any) -> Any:
    if keyword == "type":
        return _each(value, _type)
    if keyword in _COUNTS and isinstance(value, str) and value.isdecimal() and len(value) < 19:
        return int(value)
    if keyword in _NAMED and isinstance(value, dict):
        return {name: _schema(inner) for name, inner in value.items()}
    return _each(value, _schema) if keyword in _SCHEMAS else value


def _each(value: Any, turn: Callable[[Any], Any]) -> Any:
    return [turn(inner) for inner in value] if isinstance(value, list) else turn(value)


def _type(name: Any) -> Any:
    return name.lower() if isinstance(name, str) and name in _TYPES else name


def _schema(value: Any) -> Any:
    return json_schema(value) if isinstance(value, dict) else value
