"""From a spec to a backend. Kinds are imported when one is made."""

from __future__ import annotations

from typing import Any

from rollserve.backend.base import Backend
from rollserve.errors import InvalidInput, UnknownName
from rollserve.records.policy import BackendKind, BackendSpec

_WITH_ADAPTERS = (BackendKind.VLLM, BackendKind.SGLANG, BackendKind.SCRIPTED)
_OPTIONS = ("connect_timeout_s", "control_timeout_s", "adapter_path")


def make_backend(spec: BackendSpec, model: str) -> Backend:
    """A client of the server at ``spec.url``, for the weights it serves as ``model``. Connects to
    nothing yet. ``spec.options``: ``connect_timeout_s``, ``control_timeout_s``, and for kinds ``vllm`` and
    ``sglang`` ``adapter_path``. Raises ``InvalidInput`` (fields ``url``, ``options.*``)."""
    from rollserve.backend.http import Http, Timeouts

    for name in spec.options:
        if name not in _OPTIONS:
            raise UnknownName("option", name, _OPTIONS, field=f"options.{name}")
    defaults = Timeouts()
    timeouts = Timeouts(
        connect_s=_seconds(spec.options, "connect_timeout_s", defaults.connect_s),
        control_s=_seconds(spec.options, "control_timeout_s", defaults.control_s),
    )
    adapter_path = _adapter_path(spec)
    key = None if spec.api_key is None else spec.api_key.get_secret_value()
    http = Http(spec.url, api_key=key, timeouts=timeouts)
    if spec.kind is BackendKind.SGLANG:
        from rollserve.backend.sglang import SglangBackend

        return SglangBackend(http, model, adapter_path=adapter_path)
    if spec.kind is BackendKind.OPENAI:
        from rollserve.backend.openai import OpenAIBackend

        return OpenAIBackend(http, model)
    if spec.kind in (BackendKind.CHAT, BackendKind.TEXT):
        from rollserve.backend.chat import ChatBackend

        seeing = "image" in spec.accepts
        return ChatBackend(http, model, tokens=spec.kind is BackendKind.CHAT, images=seeing)
    from rollserve.backend.vllm import VllmBackend

    return VllmBackend(http, model, engine=spec.kind.value, adapter_path=adapter_path)


async def list_models(spec: BackendSpec) -> list[str]:
    """Names of what the server at ``spec.url`` serves. Raises ``InvalidInput`` when it is none."""
    from rollserve.backend.http import Http
    from rollserve.backend.probing import listed_models

    key = None if spec.api_key is None else spec.api_key.get_secret_value()
    http = Http(spec.url, api_key=key)
    try:
        return [model.id for model in await listed_models(http)]
    finally:
        await http.close()


def _adapter_path(spec: BackendSpec) -> str | None:
    path = spec.options.get("adapter_path")
    field = "options.adapter_path"
    if path is not None and spec.kind not in _WITH_ADAPTERS:
        raise InvalidInput(f"a backend of kind {spec.kind.value!r} loads no adapters", field=field)
    if path is not None and (not isinstance(path, str) or not path):
        raise InvalidInput(f"must be a path as the server sees it, not {path!r}", field=field)
    return path


def _seconds(options: dict[str, Any], name: str, default: float) -> float:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        raise InvalidInput(f"must be seconds above 0, up to 3600, not {value!r}", field=f"options.{name}")
    return float(value)
