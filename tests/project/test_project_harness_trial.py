"""What a trial of real harnesses stands on: the connection that breaks, and the plan that goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollserve.testing.harness_proxy import Proxy
from rollserve.testing.scripted import Script
from rollserve.testing.scripted_plan import SUMMARY, follow_through, long_plan
from rollserve.tiny_tokenizer import TinyTokenizer

REPLY = b"HTTP/1.1 200 OK\r\n\r\nNow and then"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1 << 16)
    writer.write(REPLY)
    await writer.drain()
    writer.close()


@asynccontextmanager
async def proxied(mark: bytes = b"Now") -> AsyncIterator[int]:
    """The port at which a server that answers everything alike is seen through a proxy."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    proxy = Proxy("127.0.0.1", server.sockets[0].getsockname()[1], mark)
    front = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server, front:
        yield front.sockets[0].getsockname()[1]


async def ask(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {path} HTTP/1.1\r\n\r\n".encode())
    try:
        return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


async def test_a_connection_breaks_before_a_reply_and_in_the_middle_of_one() -> None:
    async with proxied() as port:
        assert await ask(port, "/v1/messages/count_tokens") == REPLY
        assert await ask(port, "/v1/messages") in (b"", b"reset")
        assert await ask(port, "/v1/messages") == REPLY[: REPLY.index(b"Now") + 3]
        assert await ask(port, "/v1/messages") == REPLY


async def test_without_a_mark_it_breaks_before_a_reply_only() -> None:
    async with proxied(b"") as port:
        assert await ask(port, "/v1/messages") in (b"", b"reset")
        assert await ask(port, "/v1/messages") == REPLY


def prompt(*turns: str, tools: bool = True) -> str:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {}}}}}
    signatures = "function signatures within <tools></tools> XML tags:\n<tools>\n"
    head = f"{signatures}{json.dumps(tool)}\n</tools>" if tools else "You write titles."
    said = "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns)
    return f"<|im_start|>system\n{head}<|im_end|>\n{said}<|im_start|>assistant\n"


def say(script: Script, text: str) -> str:
    tokenizer = TinyTokenizer()
    return tokenizer.decode(list(script(tokenizer.encode(text)).token_ids)).removesuffix("<|im_end|>")


def test_the_long_plan_goes_on_where_the_agent_forgets() -> None:
    script = follow_through(long_plan())
    first = say(script, prompt("do it"))
    assert "printf" in first
    assert say(script, prompt("do it")) == first
    assert "seq 1000" in say(script, prompt("do it", "written"))
    assert say(script, prompt("do it", "written", "CONTEXT CHECKPOINT COMPACTION")) == SUMMARY
    assert say(script, prompt("please summarize", tools=False)) == SUMMARY
    assert say(script, prompt("a title", tools=False)) == "Edit a file"
    assert "seq 1000" in say(script, prompt(f"so far: {SUMMARY}"))
    assert "sed -i" in say(script, prompt(f"so far: {SUMMARY}", "read"))
    for step in ("seq 1000", "cat /workspace", "two lines", "two lines"):
        assert step in say(script, prompt("more", step, str(len(step)), str(id(step)) + step))
