"""Curricula in a code host."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollserve.errors import ConfigError
from rollserve.usercode import curriculum
from rollserve.usercode.base import CodeFault
from rollserve.usercode.curriculum import HostedCurriculum
from rollserve.usercode.hosts import ZygoteHosts

CODE = """
import time

def easiest(wanted, given, lines, results, options):
    if given >= options["most"]:
        return None
    return [given % lines, {"instruction": f"{len(results)} results"}][:wanted]

def wrong(wanted, given, lines, results, options):
    return "next"

def hangs(wanted, given, lines, results, options):
    time.sleep(600)
"""


async def test_what_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    hosts = ZygoteHosts(code_dir=tmp_path, max_hosts=2)
    asked = {"wanted": 2, "given": 4, "lines": 3, "results": [], "options": {"most": 5}}
    ask = HostedCurriculum(hosts).next_tasks
    try:
        assert await ask("mine:easiest", asked) == [1, {"instruction": "0 results"}]
        assert await ask("mine:easiest", asked | {"given": 5}) is None
        with pytest.raises(ConfigError, match="mine:wrong returned something else"):
            await ask("mine:wrong", asked)
        monkeypatch.setattr(curriculum, "TIMEOUT_S", 0.5)
        with pytest.raises(CodeFault):
            await ask("mine:hangs", asked)
        assert hosts.live == 0
    finally:
        await hosts.close()
