"""What is asked: conversations of a size, with tools."""

from __future__ import annotations

import json
from typing import Any

TOKENS = 200
WORDS = ("solve", "the", "next", "step", "file", "error", "import", "value", "test", "return", "path", "x=1;")
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"


def text(size_bytes: int, seed: int = 0) -> str:
    """Words that differ with the seed."""
    state, out, size = seed * 7919 + 17, [], 0
    while size < size_bytes:
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        out.append(WORDS[(state >> 8) % len(WORDS)])
        size += len(out[-1]) + 1
    return " ".join(out)


def tools() -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"text": {"type": "string", "description": "text"}}}
    return [
        {"type": "function", "function": {"name": name, "description": text(200), "parameters": parameters}}
        for name in ("echo", "bash")
    ]


def request(size_bytes: int, seed: int, **more: Any) -> dict[str, Any]:
    """A conversation that some other program began: system, and two exchanges that this one did not see."""
    parts = [text(size_bytes // 5, seed * 5 + part) for part in range(5)]
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)]
    messages.append({"role": "user", "content": "go on"})
    return {"model": "m", "messages": messages, "tools": tools(), "max_tokens": TOKENS, **more}


def encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()
