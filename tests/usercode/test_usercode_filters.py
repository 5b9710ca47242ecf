"""Filters in a code host."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollserve.errors import ConfigError, InvalidInput
from rollserve.usercode.base import CodeFault
from rollserve.usercode.filters import HostedFilters
from rollserve.usercode.hosts import ZygoteHosts

CODE = """
def spread(rewards: list, task: dict, options: dict) -> bool:
    return max(rewards) - min(rewards) > options.get("least", 0) and task["instruction"] != "dull"

def says_nothing(rewards, task, options):
    return None

def breaks(rewards, task, options):
    return 1 / 0
"""


async def test_a_function_decides(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    hosts = ZygoteHosts(code_dir=tmp_path, max_hosts=2)
    filters = HostedFilters(hosts)
    try:
        asked = {"rewards": [0.0, 1.0], "task": {"instruction": "go"}, "options": {"least": 0.5}}
        assert await filters.keeps("mine:spread", asked)
        assert not await filters.keeps("mine:spread", asked | {"rewards": [0.5, 0.9]})
        assert not await filters.keeps("mine:spread", asked | {"task": {"instruction": "dull"}})
        with pytest.raises(ConfigError, match="returns true or false"):
            await filters.keeps("mine:says_nothing", asked)
        with pytest.raises(CodeFault, match="ZeroDivisionError"):
            await filters.keeps("mine:breaks", asked)
        await filters.check("mine:spread", "filters.0.name")
        with pytest.raises(InvalidInput) as caught:
            await filters.check("mine:nothing", "filters.0.name")
        assert caught.value.field == "filters.0.name"
        assert hosts.live == 0
    finally:
        await hosts.close()
