"""OpenAI chat completions, to and from our records. Pure.

What can't be honoured is refused with the parameter's name. Sampling parameters are never honoured
(the run's settings win): they are kept in ``asked``, as is what is unknown. ``developer`` is
``system``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollserve.errors import ContextTooLong, InvalidInput, RollserveError
from rollserve.records.call import ChatRequest, Message, ToolCall

MAX_DEPTH = 64
"""Documents nested deeper cost a recursion in every reader."""

_READ = frozenset({"messages", "model", "tools", "stream", "stream_options", "logprobs"})
_ROLES = {"system", "user", "assistant", "tool"}


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request and how its answer is wanted."""

    request: ChatRequest
    model: str
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False


class TokenLogprob(msgspec.Struct, frozen=True):
    """One sampled token of an answer: its text and logprob."""

    token: str
    logprob: float


def parse_request(body: bytes) -> ChatCall:
    """Raises ``InvalidInput`` that names the parameter at fault."""
    raw = _decode(body)
    if not isinstance(raw, dict):
        raise InvalidInput("the body must be a JSON object", field="body")
    parsed = _convert(raw)
    _refuse_unsupported(parsed)
    if not parsed.messages:
        raise InvalidInput("at least one message is needed", field="messages")
    request = ChatRequest(
        messages=tuple(_message(message, index) for index, message in enumerate(parsed.messages)),
        tools=_tools(parsed.tools),
        asked={key: value for key, value in raw.items() if key not in _READ and value is not None},
    )
    return ChatCall(
        request=request,
        model=parsed.model,
        stream=bool(parsed.stream),
        include_usage=parsed.stream_options is not None and parsed.stream_options.include_usage,
        logprobs=bool(parsed.logprobs),
    )


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidInput("the JSON is nested too deeply", field="body") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body is not valid JSON: {error}", field="body") from error


def _convert(raw: dict[str, Any]) -> _Body:
    try:
        return msgspec.convert(raw, _Body)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").replace("[", ".").replace("]", "").strip(".") or "body"
        if "missing required field" in reason:
            field = ".".join([*([] if field == "body" else [field]), reason.split("`")[1]])
        raise InvalidInput(reason, field=field) from error


def _refuse_unsupported(body: _Body) -> None:
    refusals = {
        "n": body.n not in (None, 1),
        "top_logprobs": bool(body.top_logprobs),
        "tool_choice": body.tool_choice not in (None, "auto"),
        "response_format": body.response_format is not None and body.response_format.get("type") != "text",
        "modalities": body.modalities not in (None, ["text"]),
        "audio": body.audio is not None,
        "functions": body.functions is not None,
        "function_call": body.function_call is not None,
    }
    for name, refused in refusals.items():
        if refused:
            raise InvalidInput(f"this value of {name!r} is not supported", field=name)
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise InvalidInput("must be at least 1", field=name)


def _message(message: _Message, index: int) -> Message:
    role = "system" if message.role == "developer" else message.role
    where = f"messages.{index}"
    if role not in _ROLES:
        raise InvalidInput(f"unknown role {message.role!r}", field=f"{where}.role")
    if message.tool_calls and role != "assistant":
        raise InvalidInput("only an assistant message has tool calls", field=f"{where}.tool_calls")
    return Message(
        role=role,  # type: ignore[arg-type]  # one of _ROLES
        content=_content(message.content, where),
        reasoning=message.reasoning_content or message.reasoning or None,
        tool_calls=tuple(_tool_call(call) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _content(content: str | list[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise InvalidInput(
                f"content of type {part.type!r} is not supported", field=f"{where}.content.{index}.type"
            )
        texts.append(text)
    return "".join(texts)


def _tool_call(call: _ToolCall) -> ToolCall:
    given = call.function.arguments
    arguments = given if isinstance(given, str) else msgspec.json.encode(given or {}).decode()
    return ToolCall(id=call.id, name=call.function.name, arguments=arguments)


def _tools(tools: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...]:
    for index, tool in enumerate(tools or ()):
        if tool.get("type", "function") != "function":
            raise InvalidInput("only function tools are supported", field=f"tools.{index}.type")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidInput("a tool needs a name", field=f"tools.{index}.function.name")
        if _deeper_than(tool, MAX_DEPTH):
            raise InvalidInput(f"nested deeper than {MAX_DEPTH}", field=f"tools.{index}")
    return tuple(tools or ())


def _deeper_than(document: Any, limit: int) -> bool:
    level = [document]
    for _ in range(limit):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


def finish_reason(ours: str) -> str:
    """In OpenAI's words: an aborted answer is one that was cut."""
    return "length" if ours == "abort" else ours


def tool_calls(message: Message, *, indexed: bool = False) -> list[dict[str, Any]]:
    calls = []
    for index, call in enumerate(message.tool_calls):
        function = {"name": call.name, "arguments": call.arguments}
        plain: dict[str, Any] = {"id": call.id, "type": "function", "function": function}
        calls.append({"index": index, **plain} if indexed else plain)
    return calls


def usage(prompt_tokens: int, sampled_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
    }


def logprobs_block(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {
        "content": [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "bytes": list(entry.token.encode()),
                "top_logprobs": [],
            }
            for entry in tokens
        ]
    }


def completion(
    *,
    call_id: str,
    created_s: int,
    model: str,
    message: Message,
    finish: str,
    prompt_tokens: int,
    sampled_tokens: int,
    tokens: Sequence[TokenLogprob] | None = None,
) -> bytes:
    """The answer to a request without ``stream``."""
    reply: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if message.reasoning:
        reply["reasoning_content"] = message.reasoning
    if message.tool_calls:
        reply["tool_calls"] = tool_calls(message)
    elif reply["content"] is None:
        reply["content"] = ""
    choice = {
        "index": 0,
        "message": reply,
        "finish_reason": finish_reason(finish),
        "logprobs": logprobs_block(tokens),
    }
    return msgspec.json.encode(
        {
            "id": call_id,
            "object": "chat.completion",
            "created": created_s,
            "model": model,
            "choices": [choice],
            "usage": usage(prompt_tokens, sampled_tokens),
        }
    )


class ChunkWriter:
    """The events of one streamed answer."""

    def __init__(self, *, stream_id: str, created_s: int, model: str, include_usage: bool) -> None:
        self._head: dict[str, Any] = {
            "id": stream_id,
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
        }
        self._include_usage = include_usage

    def delta(
        self, delta: dict[str, Any], *, finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        reason = None if finish is None else finish_reason(finish)
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        extra: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return event({**self._head, "choices": [choice], **extra})

    def usage(self, prompt_tokens: int, sampled_tokens: int) -> bytes:
        """Empty unless it was asked for."""
        if not self._include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": usage(prompt_tokens, sampled_tokens)})


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def error_body(error: RollserveError, status: int) -> dict[str, Any]:
    """An error in OpenAI's form."""
    code = "context_length_exceeded" if isinstance(error, ContextTooLong) else error.code
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    return {"error": {"message": message, "type": kind, "param": error.field, "code": code}}
