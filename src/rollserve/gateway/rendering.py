"""The one door to ``renderers``: messages to prompt ids, sampled ids to a message, and the ids a
conversation gains, so that what was sampled is never rendered again.

``renderers`` costs more than a second to import: it is loaded when the first ``Rendering`` is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from rollserve.errors import InvalidInput, UnknownName
from rollserve.gateway.parsing import Parsed, ReplyParser
from rollserve.gateway.recent import RecentIds
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.call import Message, ToolCall
from rollserve.records.ids import Ids
from rollserve.records.policy import RendererSpec

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Tools = Sequence[dict[str, Any]]
_RECENT_IDS = 1 << 20
NATIVE_ID = "|"
"""Parts our id of a tool call from the one the model wrote, in formats that carry one."""

_LOCAL_BRIDGES = frozenset(
    {"qwen3", "prime-qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8", "glm-4.5", "glm-5", "glm-5.1"}
    | {"glm-5.3", "kimi-k2", "llama-3", "minimax-m2", "nemotron-3", "nemotron-3.5", "nemotron-3-ultra"}
    | {"deepseek-v3", "deepseek-r1"}
)
"""Their bridge reads no more of the past than the last call's own prompt; the others get all of it."""

_MARKED_CALLS = _LOCAL_BRIDGES - {"llama-3"}
"""A tool call begins with a control token: text before one is text."""

_OPEN_THOUGHTS = frozenset({name for name in _LOCAL_BRIDGES if "qwen3" in name or "nemotron" in name})
"""A thought that is never closed is read as one, whatever is in it."""

_OWN_ENCODERS = frozenset({"gpt-oss"})
"""They encode text themselves, and never as control tokens: a guard would reach the model as text."""

_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Prior:
    """The call that is extended. ``prompt_ids`` are its own (what it gained over its parent),
    ``context`` makes all ids up to it and its sampled ones, ``conversation`` all messages up to its
    reply, that included (only the reply unless the rendering ``reads_history``)."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    context: Callable[[], list[int]]
    conversation: Sequence[Message]


class _Rendered(Protocol):
    token_ids: list[int]


class _Renderer(Protocol):
    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None, add_generation_prompt: bool
    ) -> list[int]: ...
    def bridge_to_next_turn(
        self, prompt: list[int], completion: list[int], new: list[Any], *, tools: list[Any] | None
    ) -> _Rendered | None: ...
    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None, prompt_ids: list[int] | None
    ) -> Any: ...
    def get_stop_token_ids(self) -> list[int]: ...


def check_renderer(spec: RendererSpec, thinking: Literal["keep", "strip"] = "keep") -> None:
    """Raises ``UnknownName`` or ``InvalidInput`` (field ``renderer.…``), without a tokenizer."""
    _config(spec, thinking)


class Rendering:
    """A policy's way between messages and ids. What is long is rendered ``apart``, in one thread, while the
    event loop goes on with what is short."""

    def __init__(
        self, spec: RendererSpec, tokenizer: TextTokenizer, thinking: Literal["keep", "strip"] = "keep"
    ) -> None:
        from renderers import create_renderer

        config = _config(spec, thinking)
        try:
            self._renderer: _Renderer = create_renderer(tokenizer, config)
        except _REFUSALS as error:
            raise InvalidInput(
                f"renderer {spec.name!r} does not fit tokenizer {tokenizer.name_or_path!r}: {error}",
                field="renderer.name",
            ) from error
        self.name = spec.name
        self.tokenizer = tokenizer
        self.thinking = thinking
        self._guards = spec.name not in _OWN_ENCODERS
        self._local = spec.name in _LOCAL_BRIDGES
        self.streams_thinking = spec.name in _OPEN_THOUGHTS
        self.reads_history = spec.name == "default"
        self.apart = ThreadPoolExecutor(1, thread_name_prefix="render")
        self._tools: tuple[Tools, list[Any]] | None = None
        self._recent = RecentIds(_RECENT_IDS)
        self.think_ids = (tokenizer.token_id("<think>"), tokenizer.token_id("</think>"))
        self.mark_ids = tokenizer.control_ids | {each for each in self.think_ids if each is not None}
        self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())
        self._parser = ReplyParser(self._renderer.parse_response, tokenizer, frozenset(self.stop_token_ids))

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """``prompt`` as numbers."""
        return self.prompt(messages, tools).list

    def prompt(self, messages: Sequence[Message], tools: Tools) -> Ids:
        """Prompt ids of a whole conversation, generation prompt included. Raises ``InvalidInput``
        when the template does not accept it."""
        if not messages:
            raise InvalidInput("a request needs at least one message", field="messages")
        try:
            document = msgspec.msgpack.encode((messages, tools))
        except (OverflowError, RecursionError, TypeError, ValueError):
            return self._render(messages, tools)
        key = hashlib.blake2b(document, digest_size=16).digest()
        known = self._recent.get(key)
        if known is None:
            known = self._render(messages, tools)
            self._recent.put(key, known)
        return known

    def _render(self, messages: Sequence[Message], tools: Tools) -> Ids:
        named = _tool_names(messages)
        turns = [self._turn(message, named) for message in messages]
        try:
            ids = self._renderer.render_ids(
                turns, tools=self._guarded_tools(tools), add_generation_prompt=True
            )
        except _REFUSALS as error:  # the renderer's own word on what it can't render
            raise InvalidInput(f"renderer {self.name!r}: {error}", field="messages") from error
        return Ids(list(ids))

    def said(
        self, messages: Sequence[Message], reply: Message, tools: Tools, whole: Sequence[int]
    ) -> list[int] | None:
        """The ids a model would have to sample after ``render(messages)`` to say ``reply``, its end
        included, by the template; None where the template renders a reply otherwise than it prompts.
        ``whole`` is the conversation with what follows: some formats end a turn by what opens the next."""
        turns = [self._turn(each, _tool_names([*messages, reply])) for each in (*messages, reply)]
        prompt = self.render(messages, tools)
        try:
            ids = self._renderer.render_ids(
                turns, tools=self._guarded_tools(tools), add_generation_prompt=False
            )
        except _REFUSALS as error:
            raise InvalidInput(f"renderer {self.name!r}: {error}", field="messages") from error
        if list(ids[: len(prompt)]) != prompt:
            return None
        tail = list(ids[len(prompt) :])
        ended = self._first_stop(tail)
        if ended is not None:
            return tail[: ended + 1]
        following = self._first_stop(whole[len(prompt) :])
        return None if following is None else [*tail, whole[len(prompt) + following]]

    def _first_stop(self, ids: Sequence[int]) -> int | None:
        return next((at for at, token_id in enumerate(ids) if token_id in self.stop_token_ids), None)

    def extend(self, prior: Prior, new: Sequence[Message], tools: Tools) -> list[int] | None:
        """The ids the context gains after ``prior``'s sampled ids: a synthesised end of turn where the
        model was cut off, the new messages, the generation prompt. None where the template can't be
        extended exactly."""
        if self.reads_history:
            return self._extend_by_text(prior, new, tools)
        named = _tool_names([*prior.conversation[-1:], *new])
        turns = [self._turn(message, named) for message in new]
        if self._local:
            before = prior.prompt_ids
        else:
            before = prior.context()
            before = before[: len(before) - len(prior.sampled_ids)]
        try:
            bridged = self._renderer.bridge_to_next_turn(
                before, prior.sampled_ids, turns, tools=self._guarded_tools(tools)
            )
        except _REFUSALS as error:
            raise InvalidInput(f"renderer {self.name!r}: {error}", field="messages") from error
        if bridged is None:
            return None
        ids = bridged.token_ids
        kept = len(before) + len(prior.sampled_ids)
        # The bridge trims what follows an end of turn; sampled ids must stand as they were.
        if ids[len(before) : kept] != prior.sampled_ids or ids[: len(before)] != before:
            return None
        return list(ids[kept:])

    def parse(
        self, sampled_ids: list[int], tools: Tools, prompt_tail: list[int], *, cut: bool = False
    ) -> Parsed:
        """What the model said. ``prompt_tail`` are the call's own prompt ids; ``cut`` when it was
        stopped by a limit. Never raises for what the model wrote."""
        return self._parser.parse(sampled_ids, tools, prompt_tail, cut=cut)

    def opens_with(self, prompt_tail: list[int], offered_tools: bool) -> Literal["start", "thinking", "held"]:
        """How an answer begins: with text or a thought, in the middle of a thought, or with what can be
        told only when it is complete."""
        from renderers.reasoning import prompt_ends_in_reasoning

        if offered_tools and self.name not in _MARKED_CALLS:
            return "held"
        stops = frozenset(self.stop_token_ids)
        return (
            "thinking" if prompt_ends_in_reasoning(self.tokenizer, prompt_tail, stop_ids=stops) else "start"
        )

    def _turn(self, message: Message, named: dict[str, str]) -> dict[str, Any]:
        guard = self.tokenizer.guard if self._guards else str
        turn: dict[str, Any] = {"role": message.role, "content": guard(message.content)}
        if message.reasoning:
            turn["reasoning_content"] = guard(message.reasoning)
        if message.tool_calls:
            turn["tool_calls"] = [self._tool_call(call) for call in message.tool_calls]
        if message.role == "tool":
            if message.tool_call_id is not None:
                turn["tool_call_id"] = guard(native_id(message.tool_call_id))
            if name := message.name or named.get(message.tool_call_id or ""):
                turn["name"] = guard(name)
        elif message.name:
            turn["name"] = guard(message.name)
        return turn

    def _tool_call(self, call: ToolCall) -> dict[str, Any]:
        guard = self.tokenizer.guard if self._guards else str
        function = {"name": guard(call.name), "arguments": guard(call.arguments)}
        return {"type": "function", "id": guard(native_id(call.id)), "function": function}

    def _guarded_tools(self, tools: Tools) -> list[Any] | None:
        if not tools:
            return None
        known = self._tools  # another thread may put others there
        if known is None or (known[0] is not tools and known[0] != tools):
            guard = self.tokenizer.guard if self._guards else str
            known = self._tools = (tools, [_guard_all(tool, guard) for tool in tools])
        return known[1]

    def _extend_by_text(self, prior: Prior, new: Sequence[Message], tools: Tools) -> list[int] | None:
        """The tokenizer's own template: render once with the model's turn standing as a placeholder;
        what follows the placeholder is what the context gains, provided that the template left what
        came before as it was."""
        before, given = prior.conversation[:-1], self._guarded_tools(tools)
        if any(message.role == "assistant" for message in new):
            return None
        named = _tool_names([*prior.conversation, *new])
        past = [self._turn(message, named) for message in before]
        mark = "\uf8f2turn\uf8f2"
        turns = [*past, {"role": "assistant", "content": mark}, *(self._turn(m, named) for m in new)]
        extra = {} if given is None else {"tools": given}
        try:
            prompt = self.tokenizer.template_text(past, add_generation_prompt=True, **extra)
            whole = self.tokenizer.template_text(turns, add_generation_prompt=True, **extra)
        except InvalidInput:
            return None  # a template that insists on its tool calls: the whole is rendered instead
        head, found, tail = whole.partition(mark)
        if not found or mark in tail or head != prompt:
            return None
        ids = self.tokenizer.encode(tail)
        ended = prior.sampled_ids[-1:]
        if ended and ended[0] in self.stop_token_ids:
            return ids[1:] if ids[:1] == ended else None
        return ids


def native_id(tool_call_id: str) -> str:
    """The id the model wrote, where its format carries one; else ours."""
    return tool_call_id.partition(NATIVE_ID)[2] or tool_call_id


def _tool_names(messages: Sequence[Message]) -> dict[str, str]:
    return {call.id: call.name for message in messages for call in message.tool_calls}


def _guard_all(value: Any, guard: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, dict):
        return {_guard_all(key, guard): _guard_all(item, guard) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guard_all(item, guard) for item in value]
    return value


def _config(spec: RendererSpec, thinking: Literal["keep", "strip"]) -> Any:
    from pydantic import ValidationError
    from renderers import configs

    known = [name for name in configs._CONFIG_BY_NAME if name != "auto"]
    if spec.name not in known:
        raise UnknownName("renderer", spec.name, known, field="renderer.name", list_all=True)
    settings: dict[str, Any] = dict(spec.options)
    if thinking == "keep" and spec.name != "default":
        settings.setdefault("thinking_retention", "all")
    kind = configs._CONFIG_BY_NAME[spec.name]
    try:
        made = kind.model_validate({**settings, "name": spec.name})
    except ValidationError as error:
        raise _wrong_option(spec, error.errors()[0], kind.model_fields) from error
    _check_parsers(spec)
    return made


def _wrong_option(spec: RendererSpec, error: ErrorDetails, known: Iterable[str]) -> InvalidInput:
    where = ".".join(["renderer", "options", *(str(part) for part in error["loc"])])
    if error["type"] != "extra_forbidden":
        return InvalidInput(error["msg"], field=where)
    options = [name for name in known if name != "name"]
    return UnknownName(f"{spec.name} option", str(error["loc"][-1]), options, field=where, list_all=True)


def _check_parsers(spec: RendererSpec) -> None:
    """Those that an option names, which ``renderers`` looks for with a tokenizer at hand only."""
    from renderers import parsers

    known = {"tool_parser": parsers.TOOL_PARSERS, "reasoning_parser": parsers.REASONING_PARSERS}
    for option, names in known.items():
        given = spec.options.get(option)
        if given is not None and given not in names:
            what = option.replace("_", " ")
            raise UnknownName(what, given, names, field=f"renderer.options.{option}", list_all=True)
