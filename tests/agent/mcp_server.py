"""An MCP server of the standard library alone, as it would lie in a sandbox. Started by its text."""

import base64
import json
import os
import sys
import time
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
    *({"name": name, "inputSchema": {"type": "object"}} for name in ("count", "die", "slow", "fail", "draw")),
    {"name": "odd name/é" + "x" * 80, "inputSchema": {"type": "object"}},
    {"name": "bad_protocol", "inputSchema": {"type": "object"}},
]
count = 0


def text(words: str, is_error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}], "isError": is_error}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    global count
    if name == "add":
        return text(str(arguments["a"] + arguments["b"]))
    if name == "count":
        count += 1
        return text(f"{count} {os.environ.get('GREETING', '')}")
    if name == "die":
        print("I am dying", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "slow":
        time.sleep(60)
    if name == "fail":
        return text("no such row", is_error=True)
    if name == "draw":
        png = base64.b64encode(b"PNG").decode()
        return {"content": [{"type": "image", "mimeType": "image/png", "data": png}], "isError": False}
    if name == "bad_protocol":
        return {"content": "not a list"}
    return text("odd")


def answer(message: dict[str, Any]) -> dict[str, Any]:
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "test", "version": "1"},
        }
    if method == "tools/list":
        cursor = int(params.get("cursor", 0))
        page = {"tools": TOOLS[cursor : cursor + 5]}
        return {**page, "nextCursor": str(cursor + 5)} if cursor + 5 < len(TOOLS) else page
    if method == "tools/call":
        return call(params["name"], params.get("arguments", {}))
    return {}


print("a line that is no message", flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": answer(message)}
        print(json.dumps(reply), flush=True)
