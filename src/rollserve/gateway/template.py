"""Chat templates of tokenizers (Jinja), as ``transformers`` runs them: sandboxed, without it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollserve.errors import InvalidInput


class ChatTemplate:
    """One template, compiled at its first use."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._compiled: Template | None = None

    def render(self, variables: dict[str, Any]) -> str:
        """Raises ``InvalidInput`` when the template does not accept the conversation."""
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            return self._compiled.render(**variables)
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(
                f"the chat template refused the conversation: {error}", field="messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = _now
    return made


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
