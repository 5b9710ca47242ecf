"""Arguments against JSON schemas: every fault is named, no schema hangs."""

from __future__ import annotations

from typing import Any

import pytest

from rollserve.usercode.schema import MAX_FAULTS, faults, lenient

OBJECT = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1},
        "range": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 2},
        "kind": {"enum": ["file", "folder"]},
        "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "point": {"$ref": "#/$defs/point"},
        "always": {"const": 1},
        "two": {"type": ["string", "integer"]},
    },
    "required": ["path"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"path": "f"}, []),
        ({"path": "f", "range": [1, 2], "kind": "file", "maybe": None, "point": {"x": 1, "y": 2}}, []),
        ({"path": "f", "maybe": 1.5, "two": 3.0}, []),
        ({}, ["`path` is required (string)"]),
        ({"path": ""}, ["`path` must have at least 1 characters"]),
        ({"pth": "f", "path": "f"}, ["`pth` is not known (did you mean 'path'?)"]),
        ({"path": None}, ["`path` must be string, not null"]),
        ({"path": "f", "range": [1, 0]}, ["`range.1` must be at least 1"]),
        ({"path": "f", "range": [1, 2, 3]}, ["`range` must have at most 2 items"]),
        ({"path": "f", "kind": "fil"}, ['`kind` must be one of ["file", "folder"] (did you mean \'file\'?)']),
        ({"path": "f", "maybe": "x"}, ["`maybe` must be number, not string"]),
        ({"path": "f", "point": {}}, ["`point.x` is required (number)"]),
        ({"path": "f", "always": 2}, ["`always` must be 1"]),
        ({"path": "f", "two": []}, ["`two` must be string or integer, not array"]),
        (
            {"path": True, "range": "x"},
            ["`path` must be string, not boolean", "`range` must be array, not string"],
        ),
        ([], ["it must be object, not array"]),
    ],
)
def test_faults_name_field_and_expectation(value: object, said: list[str]) -> None:
    assert [str(fault) for fault in faults(OBJECT, value)] == said


def test_no_more_faults_than_can_be_read() -> None:
    assert len(faults({"items": {"type": "string"}}, list(range(1000)))) == MAX_FAULTS


def test_a_strangers_schema_neither_hangs_nor_crashes() -> None:
    endless: dict[str, Any] = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
    assert faults(endless, {}) == []
    circle = {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}
    assert faults(circle, {}) == []
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(500):
        deep = {"properties": {"a": deep}, "anyOf": [deep, deep]}
    assert isinstance(faults(deep, {"a": {}}), list)
    odd: dict[str, Any]
    for odd in (
        {"properties": 3, "required": "x"},
        {"type": 7},
        {"enum": {}},
        {"anyOf": 3},
        {"minimum": "x"},
        {"items": True},
        {"$ref": "#/no"},
        {"required": [1]},
    ):
        assert isinstance(faults(odd, {"a": [1]}), list)


def test_scalars_written_as_text_are_read_where_the_schema_wants_them() -> None:
    schema = {"properties": {"n": {"type": "integer"}, "f": {"type": "number"}, "b": {"type": "boolean"}}}
    assert lenient(schema, {"n": "3", "f": "2.5", "b": "True"}) == {"n": 3, "f": 2.5, "b": True}
    kept = {"n": "x", "f": "", "b": "1", "other": "4"}
    assert lenient(schema, kept) == kept
