"""Which dialect a request speaks, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping

from rollserve.dialect.base import Dialect, Target
from rollserve.dialect.chat import ChatDialect
from rollserve.dialect.generate_content import GenerateContentDialect
from rollserve.dialect.messages import MessagesDialect
from rollserve.dialect.responses import ResponsesDialect
from rollserve.errors import InvalidInput, NotFound, RollserveError

_CHAT, _RESPONSES = ChatDialect(), ResponsesDialect()
_MESSAGES, _GOOGLE = MessagesDialect(), GenerateContentDialect()

_FIELDS: dict[str, dict[str, str]] = {
    "chat": {"schema": "response_format"},
    "responses": {"schema": "text.format", "messages": "input"},
    "messages": {"schema": "output_config.format"},
    "generate_content": {"schema": "generationConfig.responseSchema", "messages": "contents"},
}


def split(path: str) -> tuple[str | None, str]:
    """``/s/<session id>/v1/…`` → the id and the route; a path without that prefix has no id."""
    if not path.startswith("/s/"):
        return None, path
    session_id, _, route = path[3:].partition("/")
    return session_id, f"/{route}"


def find(method: str, path: str, headers: Mapping[str, str]) -> tuple[Dialect, Target]:
    """Providers share the path of models; there the headers decide. Raises ``NotFound``,
    ``MethodNotAllowed``."""
    for dialect in (*_spoken(headers), _CHAT, _RESPONSES, _MESSAGES, _GOOGLE):
        target = dialect.target(method, path)
        if target is not None:
            return dialect, target
    raise NotFound(f"no such path: {path}")


def nearest(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect in which a request is told that it is none."""
    if spoken := _spoken(headers):
        return spoken[0]
    if "/messages" in path:
        return _MESSAGES
    if path.startswith(("/v1beta", "/v1alpha")) or ":" in path:
        return _GOOGLE
    return _RESPONSES if "/responses" in path else _CHAT


def _spoken(headers: Mapping[str, str]) -> list[Dialect]:
    speakers: tuple[MessagesDialect | GenerateContentDialect, ...] = (_MESSAGES, _GOOGLE)
    return [dialect for dialect in speakers if dialect.speaks(headers)]


def in_its_words(error: RollserveError, dialect: Dialect) -> RollserveError:
    """The error with the name that the dialect has for the field at fault."""
    name = _FIELDS[dialect.name].get(error.field or "") if isinstance(error, InvalidInput) else None
    if name is not None:
        error.field = name
    return error
