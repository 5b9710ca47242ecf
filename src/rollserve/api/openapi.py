"""The OpenAPI page: the framework's own description, and the bodies it does not read itself."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from rollserve.wire import (
    BeginRegrade,
    BeginUpdate,
    CallbackBody,
    CommitCheckpoint,
    CommitUpdate,
    CreatePolicy,
    Delivery,
    ExportGroups,
    ExportPage,
    LeaseGroups,
    OpenRun,
    Problem,
    RecordedCalls,
    RegisterBackend,
    RenewLease,
    RenewUpdate,
    ResendMessages,
    Rewind,
    SetVersion,
    SubmitGroups,
    Trajectory,
    WireSample,
)

BODIES = (
    BeginRegrade,
    BeginUpdate,
    CommitCheckpoint,
    CommitUpdate,
    CreatePolicy,
    ExportGroups,
    LeaseGroups,
    OpenRun,
    RegisterBackend,
    RenewLease,
    RenewUpdate,
    ResendMessages,
    Rewind,
    SetVersion,
    SubmitGroups,
)
_STRUCTS = (CallbackBody, Delivery, ExportPage, RecordedCalls, Trajectory, WireSample)
_REF = "#/components/schemas/"


class DescribedApp(FastAPI):
    """Its page has every body, answer and error in it."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is not None:
            return self.openapi_schema
        schema = super().openapi()
        components: dict[str, Any] = schema.setdefault("components", {}).setdefault("schemas", {})
        components |= _bodies() | _structs()
        components["Problem"] = Problem.model_json_schema()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = _PROBLEM
        self.openapi_schema = schema
        return schema


_PROBLEM = {
    "description": "What went wrong, and where",
    "content": {"application/problem+json": {"schema": {"$ref": f"{_REF}Problem"}}},
}


def _bodies() -> dict[str, Any]:
    _, defined = models_json_schema(
        [(model, "validation") for model in BODIES], ref_template=f"{_REF}{{model}}-Input"
    )
    return {f"{name}-Input": schema for name, schema in defined["$defs"].items()}


def _structs() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=f"{_REF}{{name}}")
    samples = {"type": "array", "items": {"$ref": f"{_REF}WireSample"}}
    return {**components, "WireSamples": samples}
