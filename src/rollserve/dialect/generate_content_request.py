"""Requests of Google's generateContent, in our words. Pure.

* ``ANY`` and ``VALIDATED`` are advice: they are kept in ``asked``. Tools that Google's servers would run are
  left out and named in ``asked``; a request with no other tool is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollserve.dialect.base import Asked, Target
from rollserve.dialect.google_contents import camel, messages, system
from rollserve.dialect.google_schema import json_schema
from rollserve.dialect.images import Pictures
from rollserve.dialect.openai import hints
from rollserve.dialect.reading import convert, decode, storable
from rollserve.errors import InvalidInput
from rollserve.records.call import ChatRequest

_READ = frozenset({"contents", "systemInstruction", "tools", "generationConfig", "model"})
_CONFIG_READ = frozenset(
    {"stopSequences", "responseMimeType", "responseSchema", "responseJsonSchema", "responseLogprobs"}
    | {"candidateCount", "maxOutputTokens"}
)
_UNSUPPORTED = ("speechConfig", "imageConfig", "responseFormat", "translationConfig", "logprobs")
_MODES = frozenset({"AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED"})
_MOST_CANDIDATES = 128


class _Config(msgspec.Struct, rename="camel"):
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_logprobs: bool | None = None
    response_modalities: list[str] | None = None
    candidate_count: int | None = None
    thinking_config: dict[str, Any] | None = None


class _Body(msgspec.Struct, rename="camel"):
    contents: list[Any]
    system_instruction: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    cached_content: str | None = None


class GoogleForm(msgspec.Struct, frozen=True, kw_only=True):
    """``array``: the stream is one JSON array, not events. ``thoughts``: they are wanted in the answer."""

    array: bool = False
    thoughts: bool = True


def read(target: Target, body: bytes, headers: Mapping[str, str], query: Mapping[str, str]) -> Asked:
    """Raises ``InvalidInput``; names of fields are in camelCase."""
    raw = camel(decode(body), "body")
    if target.operation == "count" and "generateContentRequest" in raw:
        raw = camel(raw["generateContentRequest"], "generateContentRequest")
    parsed = convert(raw, _Body)
    if parsed.cached_content:
        raise InvalidInput("cached contents are not supported", field="cachedContent")
    if not parsed.contents:
        raise InvalidInput("at least one content is needed", field="contents")
    given = camel(parsed.generation_config or {}, "generationConfig")
    config = _config(given)
    tools, left_out = _tools(parsed.tools or ())
    pictures = Pictures()
    request = ChatRequest(
        messages=(*system(parsed.system_instruction), *messages(parsed.contents, pictures)),
        tools=tools if _offers(parsed.tool_config) else (),
        asked=_asked(raw, given, config, left_out),
        stop=tuple(config.stop_sequences or ()),
        schema=_answer_schema(config),
        hints=hints(headers, {}),
        pictures=pictures.found,
    )
    thinking = camel(config.thinking_config or {}, "generationConfig.thinkingConfig")
    return Asked(
        request=request,
        model=target.model,
        stream=bool(target.stream),
        n=config.candidate_count or 1,
        logprobs=bool(config.response_logprobs),
        form=GoogleForm(
            array=query.get("alt", "json") != "sse", thoughts=thinking.get("includeThoughts") is not False
        ),
    )


def _tools(tools: Sequence[Any]) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """The functions as OpenAI tool objects, and the names of what is left out."""
    offered: list[dict[str, Any]] = []
    left_out: list[str] = []
    for index, raw in enumerate(tools):
        at = f"tools.{index}"
        tool = camel(raw, at)
        declared = tool.get("functionDeclarations") or []
        if not isinstance(declared, list):
            raise InvalidInput("must be an array", field=f"{at}.functionDeclarations")
        offered += [_tool(each, f"{at}.functionDeclarations.{i}") for i, each in enumerate(declared)]
        left_out += [name for name in tool if name != "functionDeclarations" and tool[name] is not None]
    if left_out and not offered:
        raise InvalidInput(f"the tool {left_out[0]!r} is not supported", field="tools")
    return tuple(offered), left_out


def _tool(raw: Any, at: str) -> dict[str, Any]:
    declared = camel(raw, at)
    name, description = declared.get("name"), declared.get("description")
    if not isinstance(name, str) or not name:
        raise InvalidInput("a function needs a name", field=f"{at}.name")
    if description is not None and not isinstance(description, str):
        raise InvalidInput("must be a string", field=f"{at}.description")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    for key in ("parameters", "parametersJsonSchema"):
        if declared.get(key) is not None:
            function["parameters"] = _schema(declared[key], f"{at}.{key}")
    return {"type": "function", "function": function}


def _schema(raw: Any, at: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidInput("must be an object", field=at)
    storable(raw, at)
    return json_schema(raw)


def _offers(tool_config: dict[str, Any] | None) -> bool:
    calling = camel(tool_config or {}, "toolConfig").get("functionCallingConfig")
    at = "toolConfig.functionCallingConfig"
    mode = "AUTO" if calling is None else camel(calling, at).get("mode") or "AUTO"
    if not isinstance(mode, str) or mode.upper() not in _MODES:
        raise InvalidInput(f"unknown mode {mode!r}", field=f"{at}.mode")
    return mode.upper() != "NONE"


def _config(given: dict[str, Any]) -> _Config:
    at = "generationConfig"
    config = convert(given, _Config, at=at)
    for name in _UNSUPPORTED:
        if given.get(name):
            raise InvalidInput(f"{name!r} is not supported", field=f"{at}.{name}")
    if [each.upper() for each in config.response_modalities or ["TEXT"]] != ["TEXT"]:
        raise InvalidInput("only TEXT is supported", field=f"{at}.responseModalities")
    if "" in (config.stop_sequences or ()):
        raise InvalidInput("a stop sequence must not be empty", field=f"{at}.stopSequences")
    for name, value, most in (
        ("maxOutputTokens", config.max_output_tokens, 2**63 - 1),
        ("candidateCount", config.candidate_count, _MOST_CANDIDATES),
    ):
        if value is not None and not 1 <= value <= most:
            raise InvalidInput(f"must be from 1 to {most}", field=f"{at}.{name}")
    return config


def _answer_schema(config: _Config) -> dict[str, Any] | None:
    at = "generationConfig"
    if config.response_mime_type not in (None, "", "text/plain", "application/json"):
        raise InvalidInput(f"{config.response_mime_type!r} is not supported", field=f"{at}.responseMimeType")
    if config.response_json_schema is not None:
        return _schema(config.response_json_schema, f"{at}.responseJsonSchema")
    if config.response_schema is not None:
        return _schema(config.response_schema, f"{at}.responseSchema")
    return {} if config.response_mime_type == "application/json" else None


def _asked(
    raw: dict[str, Any], given: dict[str, Any], config: _Config, left_out: list[str]
) -> dict[str, Any]:
    """``max_tokens`` in the word that the gateway reads; Google's other settings as they came."""
    asked = {name: value for name, value in raw.items() if name not in _READ and value is not None}
    if wanted := {name: value for name, value in given.items() if name not in _CONFIG_READ}:
        asked["generationConfig"] = wanted
    for name, value in asked.items():
        storable({name: value}, name)
    if config.max_output_tokens is not None:
        asked["max_tokens"] = config.max_output_tokens
    if left_out:
        asked["tools_left_out"] = left_out
    return asked
