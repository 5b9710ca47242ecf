"""How each kind of backend is told the schema that an answer must have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollserve.backend import sglang, vllm
from rollserve.backend.base import GenerateRequest
from rollserve.records.call import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def request(schema: dict[str, Any] | None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", model="m", token_ids=[1, 2], sampling=SamplingParams(json_schema=schema)
    )


@pytest.mark.parametrize(
    ("schema", "wanted"), [(None, None), (SCHEMA, {"json": SCHEMA}), ({}, {"json_object": True})]
)
def test_vllm(schema: dict[str, Any] | None, wanted: dict[str, Any] | None) -> None:
    body = msgspec.json.decode(vllm.GenerateFormat().encode(request(schema), stream=False))
    assert body["sampling_params"].get("structured_outputs") == wanted


@pytest.mark.parametrize(("schema", "wanted"), [(None, None), (SCHEMA, SCHEMA), ({}, {"type": "object"})])
def test_sglang(schema: dict[str, Any] | None, wanted: dict[str, Any] | None) -> None:
    body = msgspec.json.decode(sglang.GenerateFormat().encode(request(schema), stream=False))
    given = body["sampling_params"].get("json_schema")
    assert (None if given is None else msgspec.json.decode(given)) == wanted
