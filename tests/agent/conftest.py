"""Agents and tools of a user, and hosts over them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollserve.usercode.base import CodeInfo, Role
from rollserve.usercode.hosts import HostSettings, ZygoteHosts

AGENTS = '''
import asyncio, os, sys
from rollserve.agent.base import AgentResult
from rollserve.agent.pictures import instruction_message
from rollserve.errors import Conflict, ContextTooLong, InvalidInput, LimitReached, NotFound
from rollserve.records.call import Message

class Solver:
    """Asks, runs the tools, answers with what the model says last."""

    def __init__(self, prefix: str = "", turns: int = 8):
        self.prefix, self.turns = prefix, turns

    async def run(self, episode):
        messages = [Message(role="user", content=episode.task.instruction)]
        for _ in range(self.turns):
            reply = await episode.model.chat(messages, tools=episode.tools.schemas)
            messages.append(reply.message)
            if not reply.message.tool_calls:
                episode.log("done")
                return self.prefix + reply.message.content
            for call in reply.message.tool_calls:
                result = await episode.tools.call(call.name, call.arguments)
                messages.append(Message(role="tool", content=result.text, tool_call_id=call.id))
        return AgentResult(truncated_by="turns", detail={"seen": len(messages)})

class Forks:
    """Tries two things from one state of its sandbox, and speaks to a port of one."""

    async def run(self, episode):
        box = episode.sandbox
        await box.exec("echo start > state")
        snapshot = await box.snapshot()
        left, right = await box.fork(snapshot), await box.fork()
        await left.write_file("state", b"left")
        said = [(await one.read_file("state")).decode().strip() for one in (box, left, right)]
        await right.close()
        try:
            await right.exec("true")
        except NotFound:
            said.append("closed")
        try:
            await box.close()
        except Conflict:
            said.append("owned")
        await left.exec(SERVE)
        for tcp in (False, True):
            address = await left.forward(8765, tcp=tcp)
            host, _, port = address.partition(":")
            opening = asyncio.open_connection(host, port) if tcp else asyncio.open_unix_connection(address)
            reader, writer = await opening
            said.append((await reader.read()).decode())
            writer.close()
        return " ".join(said)

SERVE = """perl -e 'use Socket; socket(S, 2, 1, 0); bind(S, sockaddr_in(8765, inet_aton("127.0.0.1")));
listen(S, 5); open(F, ">up"); close F; while (accept(C, S)) { print C "port"; close C }' >/dev/null 2>&1 &
until [ -e up ]; do sleep 0.01; done"""

class Looks:
    """Calls a tool and answers with what it attached."""

    async def run(self, episode):
        result = await episode.tools.call("picture", "{}")
        return result.attachments[0].media_type + " " + result.attachments[0].base64

class Shows:
    """Shows what a tool attached, and says whether the model takes it."""

    async def run(self, episode):
        result = await episode.tools.call("picture", "{}")
        image = await episode.model.show(result.attachments[0].data)
        if image is None:
            return "not seen"
        task = await instruction_message(episode.task, episode.model)
        return (await episode.model.chat([task, Message(role="user", images=(image,))])).message.content

class Nothing:
    async def run(self, episode):
        return None

class Wrong:
    async def run(self, episode):
        return {"answer": 1}

class Crash:
    async def run(self, episode):
        raise ZeroDivisionError("by me")

class Leave:
    async def run(self, episode):
        os._exit(9)

class Careful:
    async def run(self, episode):
        try:
            await episode.model.chat([Message(role="user", content="x")])
        except LimitReached as error:
            return AgentResult(answer="kept", truncated_by=error.limit)

class BadWords:
    async def run(self, episode):
        await episode.model.chat([{"role": "nobody"}])

class Impatient:
    async def run(self, episode):
        try:
            await asyncio.wait_for(episode.model.chat([Message(role="user", content="x")]), 0.1)
        except TimeoutError:
            return "gave up"

class Needs:
    def __init__(self, key: str): ...
    async def run(self, episode):
        return "ok"

class NotAsync:
    def run(self, episode):
        return "no"
'''

TOOLS = '''
import os, time
from rollserve.sandbox.tools import Attachment, ToolResult

SEEN = []

def remember(word: str) -> str:
    """Remember a word."""
    SEEN.append(word)
    return ",".join(SEEN)

def pid() -> int:
    return os.getpid()

def crash() -> str:
    raise RuntimeError("a fault of the tool")

def die() -> str:
    os._exit(1)

def slow() -> str:
    time.sleep(1000)

def finish(answer: str) -> ToolResult:
    return ToolResult(text="ok", answer=answer)

def picture() -> ToolResult:
    return ToolResult(text="[attached]", attachments=(Attachment(media_type="image/png", base64="UE5H"),))

async def cat(sandbox, path: str) -> str:
    """Show a file."""
    return (await sandbox.read_file(path)).decode()

def run(sandbox, command: str) -> str:
    result = sandbox.exec(command, timeout_s=5)
    sandbox.write_file("/workspace/out", result.output.encode())
    return result.output
'''


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def agent_hosts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ZygoteHosts]:
    tmp_path = tmp_path_factory.mktemp("code")
    (tmp_path / "my_agents.py").write_text(AGENTS)
    (tmp_path / "my_tools.py").write_text(TOOLS)
    hosts = ZygoteHosts(code_dir=tmp_path, settings=HostSettings(cancel_grace_s=0.5))
    yield hosts
    await hosts.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def solver(agent_hosts: ZygoteHosts) -> CodeInfo:
    return await agent_hosts.describe("my_agents:Solver", Role.AGENT, field="agent.name")
