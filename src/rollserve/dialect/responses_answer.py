"""Answers as responses and their items. Pure.

Reasoning goes out as its item's summary, which is what clients send back, and its ``encrypted_content`` is
the mark of the call, asked for or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollserve.dialect.base import Answered, TokenLogprob
from rollserve.dialect.marks import mark
from rollserve.dialect.openai import error_document, logprob_entries
from rollserve.dialect.responses_ids import RAW_INPUT, item_id, response_id
from rollserve.dialect.responses_request import ResponsesForm
from rollserve.dialect.responses_tools import Origin, custom_input
from rollserve.errors import ContextTooLong, RollserveError
from rollserve.records.call import ToolCall


def response(
    form: ResponsesForm,
    *,
    call_id: str,
    model: str,
    created_s: int,
    status: str,
    output: Sequence[dict[str, Any]] = (),
    usage: dict[str, Any] | None = None,
    error: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "id": response_id(call_id),
        "object": "response",
        "created_at": created_s,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": output,
        "usage": usage,
        **form.repeated,
    }


def was_cut(answer: Answered) -> bool:
    return answer.finish_reason in ("length", "abort")


def status(answer: Answered) -> str:
    return "incomplete" if was_cut(answer) else "completed"


def usage(answer: Answered) -> dict[str, Any]:
    """The form demands numbers where none is known: of reasoning tokens, and of tokens put in a cache."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }


def output(answer: Answered, form: ResponsesForm) -> list[dict[str, Any]]:
    """The items of an answer; what was cut off is the last of them."""
    message, call_id = answer.message, answer.call_id
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(reasoning_item(item_id("rs", call_id, 0), message.reasoning, call_id))
    if message.content or not (message.reasoning or message.tool_calls):
        part = text_part(message.content, answer.tokens)
        items.append(message_item(item_id("msg", call_id, len(items)), [part]))
    for call in message.tool_calls:
        items.append(call_item(call, form, call_id, len(items)))
    if was_cut(answer):
        cut_off(items[-1])
    return items


def cut_off(item: dict[str, Any]) -> None:
    if "status" in item:
        item["status"] = "incomplete"


def reasoning_item(own_id: str, text: str | None, call_id: str | None) -> dict[str, Any]:
    """``text`` and ``call_id`` are None as long as they are not known."""
    return {
        "id": own_id,
        "type": "reasoning",
        "summary": [] if text is None else [summary_part(text)],
        "encrypted_content": None if call_id is None else mark(call_id),
    }


def summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def message_item(own_id: str, parts: list[dict[str, Any]], state: str = "completed") -> dict[str, Any]:
    return {"id": own_id, "type": "message", "role": "assistant", "status": state, "content": parts}


def text_part(text: str, tokens: Sequence[TokenLogprob] | None = None) -> dict[str, Any]:
    """``tokens`` are all that were sampled: reasoning and calls have no place for theirs."""
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": logprob_entries(tokens or ()),
    }


def call_item(call: ToolCall, form: ResponsesForm, call_id: str, index: int) -> dict[str, Any]:
    """Under the names by which the client knows the tool. What is no input for a custom tool goes out as
    the model wrote it, for the tool to refuse."""
    origin = form.origins.get(call.name, Origin(call.name))
    space = {"namespace": origin.namespace} if origin.namespace else {}
    shared = {"call_id": call.id, "name": origin.name, **space, "status": "completed"}
    if not origin.custom:
        own_id = item_id("fc", call_id, index)
        return {"id": own_id, "type": "function_call", "arguments": call.arguments, **shared}
    text = custom_input(call.arguments)
    own_id = item_id(RAW_INPUT if text is None else "ctc", call_id, index)
    return {
        "id": own_id,
        "type": "custom_tool_call",
        "input": call.arguments if text is None else text,
        **shared,
    }


def stream_error(error: RollserveError, http_status: int) -> dict[str, str]:
    """By the code, a client tells what it may try again (``server_error``) from what it must not."""
    code = "server_error" if http_status >= 500 else "invalid_prompt"
    if isinstance(error, ContextTooLong):
        code = "context_length_exceeded"
    elif http_status == 429:
        code = "rate_limit_exceeded"
    return {"code": code, "message": error_document(error, http_status)["message"]}
