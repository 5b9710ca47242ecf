"""Graders of a user, and hosts over them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollserve.grader.base import Grader
from rollserve.grader.registry import GraderCatalog
from rollserve.records.task import GraderSpec
from rollserve.usercode.hosts import HostSettings, ZygoteHosts

GRADERS = """
import os, sys, time
from rollserve.grader.base import Grade
from rollserve.records.call import Message

def plain(grading, *, wanted: str = "42", scale: float = 1.0) -> float:
    grading.log(f"grading {grading.answer}")
    return scale * (grading.answer == wanted)

async def words(grading) -> Grade:
    said = [message.content for message in grading.conversation]
    return Grade(reward=0.5, call_rewards={grading.call_ids[0]: 1}, detail={"said": said})

def mapping(grading):
    return {"reward": 1, "detail": {"image": grading.task.image}}

def truth(grading):
    return grading.answer == "42"

def in_sandbox(grading):
    grading.sandbox.write_file("b", b"new")
    return float(grading.sandbox.read_file("a"))

async def in_sandbox_async(grading):
    return float((await grading.sandbox.exec("score")).output)

def judged(grading):
    question = Message(role="user", content=f"is {grading.answer} right?")
    return float(grading.model.chat([question], model="judge", max_tokens=5).message.content)

async def judged_async(grading):
    question = Message(role="user", content=f"is {grading.answer} right?")
    return float((await grading.model.chat([question], model="judge")).message.content)

def looks(grading):
    image = grading.model.show(b"PNG", model="judge")
    question = Message(role="user", content="is it right?", images=(image,))
    return float(grading.model.chat([question], model="judge").message.content)

def crash(grading): raise RuntimeError("no grade")
def leave(grading): sys.exit(0)
def hang(grading): time.sleep(1000)
def words_for_a_number(grading): return "1.0"
def nothing(grading): return None
def bad_mapping(grading): return {"rewrd": 1}
def not_a_number(grading): return float("nan")
def beyond_float32(grading): return 1e300
def endless(grading): return {"reward": 1, "call_rewards": {"c1": float("inf")}}
def stranger(grading): return Grade(reward=1, call_rewards={"c9": 1.0})
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def grader_hosts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ZygoteHosts]:
    tmp_path = tmp_path_factory.mktemp("code")
    (tmp_path / "my_graders.py").write_text(GRADERS)
    hosts = ZygoteHosts(code_dir=tmp_path, settings=HostSettings(cancel_grace_s=0.3))
    yield hosts
    await hosts.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plain_grader(grader_hosts: ZygoteHosts) -> Grader:
    entry = await GraderCatalog(grader_hosts).resolve(GraderSpec(name="my_graders:plain"))
    return entry.make({})
