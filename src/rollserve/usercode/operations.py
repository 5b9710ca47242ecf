"""What a host can be asked to do, each an operation by name: encoded parameters in, a value out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from pydantic_core import to_json

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import InvalidInput
from rollserve.grader.base import Grade, Grading
from rollserve.records.task import Task
from rollserve.sandbox.tools import ToolResult
from rollserve.usercode import params
from rollserve.usercode.arguments import argument_model, bind
from rollserve.usercode.base import CodeFault, CodeInfo, Ending, Role
from rollserve.usercode.child import Host, Operations
from rollserve.usercode.loading import describe, given_first, load, load_module, split
from rollserve.usercode.proxies import (
    AgentsSandbox,
    BlockingModel,
    BlockingSandbox,
    HostedModel,
    HostedSandbox,
    HostedToolbox,
)
from rollserve.usercode.sources import Sources

T = TypeVar("T")


def _decode(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)


def _wrong_result(path: str, value: object, wanted: str) -> CodeFault:
    message = f"{path} returned {type(value).__name__}; expected {wanted}"
    return CodeFault(message, ending=Ending.RAISED)


def _run(host: Host, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, plain or not, on the main thread."""
    result = function(*args, **kwargs)
    return host.run(result) if inspect.iscoroutine(result) else result


def _sandbox(host: Host, function: Callable[..., Any], sandbox_id: str | None) -> Any:
    if sandbox_id is None:
        return None
    proxy = HostedSandbox if _is_async(function) else BlockingSandbox
    return proxy(host.channel, sandbox_id)


def _is_async(function: Callable[..., Any]) -> bool:
    call = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(call)


def _model(host: Host, function: Callable[..., Any]) -> Any:
    return HostedModel(host.channel) if _is_async(function) else BlockingModel(host.channel)


def _agents_sandbox(host: Host, sandbox_id: str | None) -> Any:
    return None if sandbox_id is None else AgentsSandbox(host.channel, sandbox_id)


def _grade(path: str, value: object) -> Grade:
    if isinstance(value, Grade):
        return value
    if isinstance(value, Mapping):
        try:
            return msgspec.convert(dict(value), _GradeDict).grade()
        except msgspec.ValidationError as error:
            raise CodeFault(f"{path} returned a bad grade: {error}", ending=Ending.RAISED) from None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _wrong_result(path, value, "a number, a Grade or a dict with 'reward'")
    return Grade(reward=float(value))  # a bool, an int, a float, a NumPy or torch scalar


class _GradeDict(msgspec.Struct, forbid_unknown_fields=True):
    reward: float
    call_rewards: dict[str, float] = {}
    detail: dict[str, Any] = {}

    def grade(self) -> Grade:
        return Grade(reward=self.reward, call_rewards=self.call_rewards, detail=self.detail)


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # models, dataclasses, dates, …; what has no JSON by its str
        return to_json(value, fallback=str).decode()


class UserCode:
    """The operations, over what has been imported and read so far. The zygote holds one and prepares
    it; every host gets it as it was at the fork. ``sources`` are the files it was imported from."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._models: dict[tuple[str, Role], type[BaseModel]] = {}

    @property
    def operations(self) -> Operations:
        return {
            "describe": self.describe,
            "load": self.load,
            "agent": self.agent,
            "grade": self.grade,
            "tool": self.tool,
            "function": self.function,
        }

    def prepare(self, path: str, role: Role) -> None:
        """Import ``path`` and read its signature, so that forks need not. A module that defines
        ``__preload__()`` gets to fill its caches."""
        found = load(path)
        if role is not Role.ANY:
            self._arguments(path, role, found)
        warm_up = getattr(load_module(split(path)[0]), "__preload__", None)
        if warm_up is not None:
            warm_up()

    def _arguments(self, path: str, role: Role, found: Any) -> type[BaseModel]:
        if (path, role) not in self._models:
            self._models[path, role] = argument_model(found, skip=given_first(found, role))
        return self._models[path, role]

    def describe(self, host: Host, data: bytes) -> CodeInfo:
        order = _decode(data, params.Describe)
        info = describe(order.path, order.role, self._sources)
        return msgspec.structs.replace(info, files=self._sources.files())

    def load(self, host: Host, data: bytes) -> list[str]:
        """Import ahead of another operation. Returns the files that were not read as it was expected. An
        import that fails is left to that operation, which meets it again."""
        order = _decode(data, params.Load)
        for path in order.paths:
            with suppress(CodeFault, InvalidInput):
                load(path)
        return [
            path for path, stamp in self._sources.files().items() if order.files.get(path, stamp) != stamp
        ]

    def agent(self, host: Host, data: bytes) -> AgentResult:
        order = _decode(data, params.RunAgent)
        kind = load(order.path)
        model = self._arguments(order.path, Role.AGENT, kind)
        agent = kind(**bind(model, msgspec.json.decode(order.options_json)))
        episode = Episode(
            task=Task.model_validate_json(order.task_json),
            tools=HostedToolbox(host.channel, order.schemas),
            model=HostedModel(host.channel),
            log=host.channel.note,
            base_url=order.base_url,
            api_key=order.api_key,
            sandbox=_agents_sandbox(host, order.sandbox_id),
        )
        result = _run(host, agent.run, episode)
        if isinstance(result, AgentResult):
            return result
        if result is None or isinstance(result, str):
            return AgentResult(answer=result)
        raise _wrong_result(order.path, result, "AgentResult, str or None")

    def grade(self, host: Host, data: bytes) -> Grade:
        order = _decode(data, params.RunGrader)
        function = load(order.path)
        model = self._arguments(order.path, Role.GRADER, function)
        options = bind(model, msgspec.json.decode(order.options_json))
        grading = Grading(
            task=Task.model_validate_json(order.task_json),
            answer=order.answer,
            conversation=order.conversation,
            call_ids=order.call_ids,
            log=host.channel.note,
            sandbox=_sandbox(host, function, order.sandbox_id),
            model=_model(host, function) if order.has_model else None,
        )
        return _grade(order.path, _run(host, function, grading, **options))

    def tool(self, host: Host, data: bytes) -> ToolResult:
        order = _decode(data, params.RunTool)
        function = load(order.path)
        model = self._arguments(order.path, Role.TOOL, function)
        arguments = bind(model, msgspec.json.decode(order.arguments_json))
        first = [_sandbox(host, function, order.sandbox_id)] if given_first(function, Role.TOOL) else []
        value = _run(host, function, *first, **arguments)
        if isinstance(value, ToolResult):
            return value
        return ToolResult(text=_text(value))

    def function(self, host: Host, data: bytes) -> params.Json:
        order = _decode(data, params.RunFunction)
        value = _run(host, load(order.path), **msgspec.json.decode(order.arguments_json))
        return params.Json(msgspec.json.encode(value))
