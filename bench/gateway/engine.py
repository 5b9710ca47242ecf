"""An engine that answers from memory as vLLM does."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httptools
import msgspec

from gateway.bodies import CHAT, GENERATE, TOKENS, WORDS
from rollserve.gateway.tokens import load_tokenizer
from rollserve.testing.scripted import Chunk, logprob_of
from rollserve.testing.scripted_bodies import encode_stream, encode_whole

PROMPT_TOKENS = 2000
FLUSHES = 10


class Engine(asyncio.Protocol):
    """Answers after ``latency_s`` from bodies made once; a stream is spread over it."""

    def __init__(self, latency_s: float, bodies: dict[str, tuple[bytes, list[bytes]]]) -> None:
        self._latency_s = latency_s
        self._bodies = bodies
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url = url.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        whole, events = self._bodies.get(self._url, (b"{}", []))
        if b'"stream":true' in b"".join(self._body).replace(b" ", b""):
            head = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(b"HTTP/1.1 200 OK\r\n" + head)
            self._flush(events, 0)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(whole)
        self._loop.call_later(self._latency_s, self._transport.write, head + whole)

    def _flush(self, events: list[bytes], at: int) -> None:
        """One HTTP chunk for each event, as uvicorn does."""
        end = at + -(-len(events) // FLUSHES)
        out = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events[at:end])
        if end >= len(events):
            self._transport.write(out + b"0\r\n\r\n")
            return
        self._transport.write(out)
        self._loop.call_later(self._latency_s / (FLUSHES - 1), self._flush, events, end)


def answers(tokenizer_name: str) -> dict[str, tuple[bytes, list[bytes]]]:
    """The whole and the streamed answer of each route: ``TOKENS`` ids with logprobs."""
    tokenizer = load_tokenizer(tokenizer_name)
    ids = [*(tokenizer.encode(" ".join(WORDS)) * TOKENS)[: TOKENS - 1], tokenizer.eos_token_id or 0]
    chunks = [
        Chunk([token_id], [logprob_of(token_id)], "0", "stop" if index == TOKENS - 1 else None)
        for index, token_id in enumerate(ids)
    ]
    whole = encode_whole([Chunk(ids, [logprob_of(each) for each in ids], "0", "stop")], "r", "m", None)
    streamed = (encode_stream(chunks[: end + 1], "r", "m", None) for end in range(TOKENS))
    events, done = [b"data: " + event + b"\n\n" for event in streamed], b"data: [DONE]\n\n"
    return {
        GENERATE: (whole, [*events, done]),
        CHAT: (_chat(tokenizer, ids), [*_chunks(tokenizer, ids), done]),
    }


def _entry(tokenizer: Any, token_id: int) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    logprob = logprob_of(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def _chat(tokenizer: Any, ids: list[int]) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": tokenizer.decode(ids[:-1])},
        "logprobs": {"content": [_entry(tokenizer, token_id) for token_id in ids]},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": TOKENS}
    usage["total_tokens"] = sum(usage.values())
    document = {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": usage}
    return msgspec.json.encode(
        {**document, "prompt_token_ids": [index * 71 % 150_000 for index in range(PROMPT_TOKENS)]}
    )


def _chunks(tokenizer: Any, ids: list[int]) -> Iterator[bytes]:
    for index, token_id in enumerate(ids):
        choice = {
            "index": 0,
            "delta": {"content": tokenizer.token_text(token_id)},
            "logprobs": {"content": [_entry(tokenizer, token_id)]},
            "finish_reason": "stop" if index == len(ids) - 1 else None,
            "token_ids": [token_id],
        }
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
        yield b"data: " + msgspec.json.encode(event) + b"\n\n"


async def engine_role(sock: socket.socket, options: argparse.Namespace, upstream: str) -> None:
    bodies = answers(options.tokenizer)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(options.latency_ms / 1e3, bodies), sock=sock)
    await server.serve_forever()
