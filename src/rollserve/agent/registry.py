"""Agents by name: built in, installed (entry points ``rollserve.agents``), or an import path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollserve.agent.base import Agent, AgentEntry
from rollserve.agent.command import CommandAgent, CommandOptions, program_of
from rollserve.agent.harness.table import HARNESSES, harness_entry
from rollserve.agent.python_agent import PythonAgent
from rollserve.agent.tool_agent import ToolAgent, ToolAgentOptions
from rollserve.records.task import AgentSpec
from rollserve.usercode.base import CodeHosts, CodeInfo, Role
from rollserve.usercode.catalog import Catalog
from rollserve.usercode.options import check_arguments, parse_options


def _tool_agent(options: dict[str, Any]) -> Agent:
    return ToolAgent(parse_options(ToolAgentOptions, options, field="agent.options"))


def _check_tool_agent(options: dict[str, Any]) -> None:
    _tool_agent(options)


def _command(options: dict[str, Any]) -> Agent:
    return CommandAgent(program_of(parse_options(CommandOptions, options, field="agent.options")))


def _check_command(options: dict[str, Any]) -> None:
    _command(options)


def built_in(harness_dir: Path | None = None) -> dict[str, AgentEntry]:
    """The agents that run in the worker. A new one is a line here, a new harness one in its table."""
    return {
        "tool": AgentEntry(name="tool", make=_tool_agent, check=_check_tool_agent, shows_pictures=True),
        "command": AgentEntry(name="command", make=_command, check=_check_command, acts_inside=True),
        **{name: harness_entry(harness, harness_dir) for name, harness in HARNESSES.items()},
    }


class AgentCatalog(Catalog[AgentSpec, AgentEntry]):
    """``harness_dir`` holds the command-line harnesses installed on this machine."""

    def __init__(
        self,
        hosts: CodeHosts,
        *,
        installed: Mapping[str, str] | None = None,
        harness_dir: Path | None = None,
    ) -> None:
        super().__init__(Role.AGENT, hosts, built_in(harness_dir), installed)

    def _hosted(self, name: str, info: CodeInfo) -> AgentEntry:
        def check(options: dict[str, Any]) -> None:
            check_arguments(info.parameters, options, field="agent.options")

        def make(options: dict[str, Any]) -> Agent:
            check(options)
            return PythonAgent(self._hosts, info, options)

        return AgentEntry(
            name=name,
            make=make,
            check=check,
            hosted=True,
            shows_pictures=True,
            code={info.path: info.version},
        )
