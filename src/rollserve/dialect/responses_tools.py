"""The kinds of tools that only the Responses form has, as function tools and back. Pure.

* a *custom* tool takes free text: it is offered as a function of one string, ``input``;
* a *namespace* holds tools: they are offered under ``NAMESPACE__NAME``, what is said of all of them before
  what is said of the first, and their calls go out under both names again;
* a tool that is to be found by a search first is offered at once: there is no search;
* tools that the provider would run and that clients offer by default are dropped, and recorded as
  dropped: the model is not told of what nobody here would run. All others are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollserve.dialect.reading import storable
from rollserve.errors import InvalidInput

_HOSTED = ("web_search", "tool_search", "image_generation")
_KEPT = ("name", "description", "parameters", "strict")


class Origin(msgspec.Struct, frozen=True):
    """What the client calls a tool that we offer under another name, or in another form."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Offered(msgspec.Struct):
    """``tools`` are function tools in our form; ``origins`` are by the names they are offered under."""

    tools: list[dict[str, Any]]
    origins: dict[str, Origin]
    dropped: list[dict[str, Any]]


def read_tools(groups: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> Offered:
    """Tools from several places of a request, each with its path."""
    offered = Offered([], {}, [])
    for at, tools in groups:
        for index, tool in enumerate(tools):
            storable(tool, f"{at}.{index}")
            _take(offered, tool, f"{at}.{index}", None)
    return offered


def flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _take(offered: Offered, tool: dict[str, Any], at: str, namespace: str | None) -> None:
    kind = tool.get("type")
    if kind in ("function", "custom"):
        _offer(offered, tool, at, namespace)
    elif kind == "namespace" and namespace is None:
        _take_all(offered, tool, at)
    elif isinstance(kind, str) and kind.startswith(_HOSTED):
        offered.dropped.append(tool)
    else:
        raise InvalidInput(f"tools of type {kind!r} are not supported", field=f"{at}.type")


def _take_all(offered: Offered, tool: dict[str, Any], at: str) -> None:
    inner = tool.get("tools")
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        raise InvalidInput("must be a list of tools", field=f"{at}.tools")
    namespace, first = _name(tool, at), len(offered.tools)
    for index, each in enumerate(inner):
        _take(offered, each, f"{at}.tools.{index}", namespace)
    if tool.get("description") and len(offered.tools) > first:
        function = offered.tools[first]["function"]
        texts = (tool["description"], function.get("description"))
        function["description"] = "\n\n".join(str(text) for text in texts if text)


def _offer(offered: Offered, tool: dict[str, Any], at: str, namespace: str | None) -> None:
    custom = tool["type"] == "custom"
    origin = Origin(_name(tool, at), namespace, custom)
    name = flat_name(origin.name, namespace)
    if offered.origins.setdefault(name, origin) != origin:
        raise InvalidInput(f"two tools would be named {name!r}", field=f"{at}.name")
    function = _custom(tool, at) if custom else {key: tool[key] for key in _KEPT if tool.get(key) is not None}
    offered.tools.append({"type": "function", "function": {**function, "name": name}})


def _name(tool: dict[str, Any], at: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidInput("a tool needs a name", field=f"{at}.name")
    return name


def _custom(tool: dict[str, Any], at: str) -> dict[str, Any]:
    form = tool.get("format") or {}
    if not isinstance(form, dict):
        raise InvalidInput("must be an object", field=f"{at}.format")
    text: dict[str, Any] = {"type": "string"}
    if form.get("type") == "grammar":
        text["description"] = f"Text of this {form.get('syntax')} grammar:\n{form.get('definition')}"
    described = {"description": tool["description"]} if tool.get("description") is not None else {}
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return {"name": tool["name"], **described, "parameters": parameters}


def custom_input(arguments: str) -> str | None:
    """The text that a call of a custom tool passes; None when the model did not pass just that."""
    try:
        given = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    text = given.get("input") if isinstance(given, dict) and len(given) == 1 else None
    return text if isinstance(text, str) else None


def custom_arguments(text: str) -> str:
    return msgspec.json.encode({"input": text}).decode()
