"""The tools of a Messages request, as OpenAI tool objects. Pure.

* A tool with ``defer_loading`` is offered once a ``tool_reference`` of the history names it; all are, where
  the search that would find them is one of Anthropic's.
* Tools that Anthropic's servers would run are left out; a request with no other tool is refused.
* A choice of ``any`` or ``tool`` is advice: nothing is forced. ``none`` offers no tool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rollserve.dialect.reading import storable
from rollserve.errors import InvalidInput

_SERVED = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "tool_search_tool_",
    "advisor_",
    "mcp_toolset",
)
"""How the types of tools begin that run on Anthropic's servers."""


class Choice(msgspec.Struct):
    type: str
    name: str | None = None


class Tools(NamedTuple):
    """``left_out`` are run by a server of Anthropic's, ``deferred`` not named by the history yet."""

    offered: tuple[dict[str, Any], ...] = ()
    left_out: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()


def read_tools(tools: Sequence[dict[str, Any]], named: set[str]) -> Tools:
    """``named`` are the tools that the history's references name."""
    offered: list[dict[str, Any]] = []
    left_out: list[str] = []
    deferred: list[str] = []
    defers = not any(_kind(tool).startswith("tool_search_tool_") for tool in tools)
    for index, tool in enumerate(tools):
        if _kind(tool).startswith(_SERVED):
            left_out.append(_kind(tool))
            continue
        made = _tool(tool, f"tools.{index}")
        name = made["function"]["name"]
        if defers and tool.get("defer_loading") is True and name not in named:
            deferred.append(name)
        else:
            offered.append(made)
    if left_out and not offered and not deferred:
        raise InvalidInput(f"tools of type {left_out[0]!r} are not supported", field="tools.0.type")
    return Tools(tuple(offered), tuple(left_out), tuple(deferred))


def _kind(tool: dict[str, Any]) -> str:
    kind = tool.get("type")
    return kind if isinstance(kind, str) else ""


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """As an OpenAI tool object."""
    if tool.get("type") not in (None, "custom"):
        raise InvalidInput(f"tools of type {tool['type']!r} are not supported", field=f"{at}.type")
    name, description, schema = (tool.get(key) for key in ("name", "description", "input_schema"))
    if not isinstance(name, str) or not name:
        raise InvalidInput("a tool needs a name", field=f"{at}.name")
    if not isinstance(schema, dict):
        raise InvalidInput("a tool needs a schema of its input", field=f"{at}.input_schema")
    if description is not None and not isinstance(description, str):
        raise InvalidInput("must be a string", field=f"{at}.description")
    storable(schema, f"{at}.input_schema")
    told = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **told, "parameters": schema}}


def chosen(choice: Choice | None, offered: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    if choice is None or choice.type in ("auto", "any"):
        return offered
    if choice.type == "none":
        return ()
    if choice.type != "tool":
        raise InvalidInput(f"unknown type {choice.type!r}", field="tool_choice.type")
    if choice.name not in [tool["function"]["name"] for tool in offered]:
        raise InvalidInput(f"no tool {choice.name!r} is offered", field="tool_choice.name")
    return offered
