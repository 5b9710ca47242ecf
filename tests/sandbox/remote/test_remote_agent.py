"""The agent's shell text, in a shell of this machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from uuid import uuid4

import pytest

from rollserve.sandbox.base import SandboxLimits
from rollserve.sandbox.remote.agent import AgentText


@pytest.fixture
def text() -> Iterator[AgentText]:
    text = AgentText(f"test-{uuid4().hex}", "/tmp", SandboxLimits())
    sh(text.install())
    yield text
    shutil.rmtree(text.folder)


def sh(script: str) -> str:
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout


def test_a_command_that_ends_while_it_is_looked_at_loses_no_output(text: AgentText) -> None:
    place = f"{text.folder}/0"
    sh(f"mkdir {place}; : >{place}/o.1")
    ends = f'size() {{ wc -c <"$1"; echo printed >{place}/o.1; echo "0 0" >{place}/e.1; }}'
    _, *first = sh(text.script(f"{ends}; answer 0 1 0 0")).split()
    _, *again = sh(text.script("answer 0 1 0 0")).split()
    assert [first, again] == [["-", "-", "0"], ["0", "0", "8"]]
