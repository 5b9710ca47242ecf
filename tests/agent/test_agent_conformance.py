"""The agents that ship, and one of a user's, against the suite for agents."""

from __future__ import annotations

import pytest

from rollserve.agent.base import Agent
from rollserve.agent.python_agent import PythonAgent
from rollserve.agent.registry import AgentCatalog
from rollserve.records.task import AgentSpec
from rollserve.testing.agent_conformance import AgentConformance
from rollserve.usercode.base import CodeInfo
from rollserve.usercode.hosts import ZygoteHosts


class TestToolAgent(AgentConformance):
    @pytest.fixture
    async def subject(self) -> Agent:
        return (await AgentCatalog(ZygoteHosts()).resolve(AgentSpec())).make({})


@pytest.mark.asyncio(loop_scope="module")
class TestPythonAgent(AgentConformance):
    @pytest.fixture
    def subject(self, agent_hosts: ZygoteHosts, solver: CodeInfo) -> Agent:
        return PythonAgent(agent_hosts, solver, {})
