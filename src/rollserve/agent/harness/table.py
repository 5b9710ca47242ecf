"""The harnesses that are known, by name; their versions are pinned in their rows."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollserve.agent.base import Agent, AgentEntry
from rollserve.agent.command import CommandAgent
from rollserve.agent.harness.base import Harness, HarnessOptions, mounts_of, program_of, remedy_of
from rollserve.agent.harness.claude_code import CLAUDE_CODE
from rollserve.agent.harness.codex import CODEX
from rollserve.agent.harness.gemini_cli import GEMINI_CLI
from rollserve.agent.harness.mini_swe_agent import MINI_SWE_AGENT
from rollserve.agent.harness.opencode import OPENCODE
from rollserve.agent.harness.openhands import OPENHANDS
from rollserve.agent.harness.pi import PI
from rollserve.agent.harness.qwen_code import QWEN_CODE
from rollserve.usercode.options import parse_options

HARNESSES = MappingProxyType(
    {
        each.name: each
        for each in (
            *(PI, CODEX, CLAUDE_CODE, QWEN_CODE, GEMINI_CLI, OPENCODE),
            *(MINI_SWE_AGENT, OPENHANDS),
        )
    }
)


def harness_entry(harness: Harness, folder: Path | None) -> AgentEntry:
    """``folder`` holds the harnesses installed on this machine."""

    def parsed(options: dict[str, Any]) -> HarnessOptions:
        return parse_options(HarnessOptions, options, field="agent.options")

    def make(options: dict[str, Any]) -> Agent:
        return CommandAgent(program_of(harness, parsed(options), folder))

    def mounts(options: dict[str, Any]) -> dict[str, str]:
        return mounts_of(harness, parsed(options), folder)

    def programs(options: dict[str, Any]) -> tuple[str, ...]:
        return () if mounts(options) else (harness.program,)

    def check(options: dict[str, Any]) -> None:
        make(options)
        mounts(options)

    return AgentEntry(
        name=harness.name,
        make=make,
        check=check,
        acts_inside=True,
        mounts=mounts,
        programs=programs,
        remedy=remedy_of(harness, folder),
    )
