"""Google's contents, as our messages. Pure.

* Names are read in camelCase and in snake_case, each level for itself: one client mixes them.
* Parts of one content are joined as they are. A model's content is one message; a user's becomes tool
  messages and user messages in the order of its parts.
* Some clients drop the ids of function calls. The call then has an empty id, and its result, found by name
  and order among the calls of the model turn before, says the call's place (``base.POSITION``). A result
  that fits no call keeps its name and no id.
* A result's ``output`` is the result where nothing else stands beside it (Google's rule), else all of it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from rollserve.dialect.base import POSITION
from rollserve.dialect.images import Content, Pictures
from rollserve.dialect.marks import marked
from rollserve.dialect.reading import convert
from rollserve.dialect.tool_input import as_arguments
from rollserve.errors import InvalidInput
from rollserve.records.base import MAX_DEPTH, deeper_than
from rollserve.records.call import Message, ToolCall
from rollserve.records.image import Image

_MEDIA = frozenset({"inlineData", "fileData"})
_SAID = frozenset({"text", "functionCall", "functionResponse", "thoughtSignature"}) | _MEDIA
_ABOUT = frozenset({"thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"})


class _Content(msgspec.Struct):
    parts: list[Any] | None = None
    role: str | None = None


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: dict[str, Any] | None = None
    function_response: dict[str, Any] | None = None
    inline_data: dict[str, Any] | None = None
    file_data: dict[str, Any] | None = None


class _Blob(msgspec.Struct, rename="camel"):
    mime_type: str | None = None
    data: str | None = None
    file_uri: str | None = None


class _Call(msgspec.Struct):
    name: str
    args: dict[str, Any] | None = None
    id: str | None = None


class _Response(msgspec.Struct):
    name: str = ""
    response: dict[str, Any] | None = None
    id: str | None = None
    parts: list[Any] | None = None


class _Waiting(msgspec.Struct):
    """A call whose result has not been met."""

    name: str
    id: str
    reference: str


def camel(raw: Any, at: str) -> dict[str, Any]:
    """One level of an object with its names in camelCase."""
    if not isinstance(raw, dict):
        raise InvalidInput("must be an object", field=at)
    if not any("_" in name for name in raw):
        return raw
    made = {_camel_name(name): value for name, value in raw.items()}
    if len(made) != len(raw):
        raise InvalidInput("a name is given in two spellings", field=at)
    return made


def _camel_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other[:1].upper() + other[1:] for other in others)


def system(instruction: dict[str, Any] | None) -> list[Message]:
    if not instruction:
        return []
    texts = []
    for at, part in _parts(instruction, "systemInstruction"):
        if part.text is None:
            raise InvalidInput("only text is supported here", field=at)
        texts.append(part.text)
    return [Message(role="system", content="".join(texts))]


def messages(contents: list[Any], pictures: Pictures) -> list[Message]:
    """``pictures`` gains their images."""
    made: list[Message] = []
    waiting: list[_Waiting] = []
    for index, raw in enumerate(contents):
        at = f"contents.{index}"
        role = camel(raw, at).get("role") or "user"
        if role == "model":
            message = _model(raw, at)
            made.append(message)
            waiting = _calls_of(message)
        elif role in ("user", "function"):
            made += _user(raw, at, waiting, pictures)
        else:
            raise InvalidInput(f"unknown role {role!r}", field=f"{at}.role")
    return made


def _calls_of(message: Message) -> list[_Waiting]:
    return [
        _Waiting(call.name, call.id, call.id or f"{POSITION}{index}")
        for index, call in enumerate(message.tool_calls)
    ]


def _parts(content: Any, at: str) -> list[tuple[str, _Part]]:
    """Each part with its place. Raises ``InvalidInput`` for one that holds what we don't read."""
    found = []
    for index, raw in enumerate(convert(content, _Content, at=at).parts or ()):
        where = f"{at}.parts.{index}"
        plain = camel(raw, where)
        if plain.keys().isdisjoint(_SAID):
            what = next((name for name in plain if name not in _ABOUT), "")
            problem = f"a part with {what!r} is not supported" if what else "a part must hold something"
            raise InvalidInput(problem, field=f"{where}.{what}".rstrip("."))
        found.append((where, convert(plain, _Part, at=where)))
    return found


def _model(content: Any, at: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    call_id: str | None = None
    for where, part in _parts(content, at):
        call_id = call_id or marked(part.thought_signature)
        if part.function_call is not None:
            calls.append(_call(part.function_call, f"{where}.functionCall"))
        elif part.function_response is not None:
            raise InvalidInput("not in a model's content", field=f"{where}.functionResponse")
        elif part.inline_data is not None or part.file_data is not None:
            raise InvalidInput("only text is supported in a model's content", field=where)
        else:
            (thoughts if part.thought else texts).append(part.text or "")
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls),
        call_id=call_id,
    )


def _call(raw: dict[str, Any], at: str) -> ToolCall:
    call = convert(camel(raw, at), _Call, at=at)
    if deeper_than(call.args):
        raise InvalidInput(f"nested deeper than {MAX_DEPTH}", field=f"{at}.args")
    return ToolCall(id=call.id or "", name=call.name, arguments=as_arguments(call.args or {}))


def _user(content: Any, at: str, waiting: list[_Waiting], pictures: Pictures) -> list[Message]:
    """``waiting`` loses the calls whose results are met."""
    made: list[Message] = []
    said = Content()
    for where, part in _parts(content, at):
        if part.function_response is not None:
            said.flush(made)
            made.append(_result(part.function_response, f"{where}.functionResponse", waiting, pictures))
        elif part.function_call is not None:
            raise InvalidInput("only in a model's content", field=f"{where}.functionCall")
        else:
            said.add(part.text or "")
            if (image := _image(part, where, pictures)) is not None:
                said.add(image)
    said.flush(made)
    return made or [Message(role="user")]


def _image(part: _Part, at: str, pictures: Pictures) -> Image | None:
    for name, raw in (("inlineData", part.inline_data), ("fileData", part.file_data)):
        if raw is not None:
            place = f"{at}.{name}"
            blob = convert(camel(raw, place), _Blob, at=place)
            if name == "inlineData":
                return pictures.of_base64(blob.data, blob.mime_type, place, place)
            return pictures.of_uri(blob.file_uri, blob.mime_type, place, f"{place}.fileUri")
    return None


def _seen(raw: list[Any], at: str, pictures: Pictures) -> tuple[Image, ...]:
    """The images that a result shows; they come after what it says."""
    found = []
    for where, part in _parts({"parts": raw}, at):
        image = _image(part, where, pictures)
        if image is None:
            raise InvalidInput("a result's parts are images", field=where)
        found.append(image)
    return tuple(found)


def _result(raw: dict[str, Any], at: str, waiting: list[_Waiting], pictures: Pictures) -> Message:
    result = convert(camel(raw, at), _Response, at=at)
    if deeper_than(result.response):
        raise InvalidInput(f"nested deeper than {MAX_DEPTH}", field=f"{at}.response")
    met = next((each for each in waiting if _answers(result, each)), None)
    if met is not None:
        waiting.remove(met)
    named = met.reference if met is not None else None
    output = _output(result.response or {})
    seen = _seen(result.parts or [], at, pictures)
    return Message(
        role="tool",
        content=output,
        images=tuple(replace(image, at=len(output)) for image in seen),
        tool_call_id=result.id or named,
        name=None if result.id or not result.name else result.name,
    )


def _answers(result: _Response, call: _Waiting) -> bool:
    if result.id and call.id:
        return result.id == call.id
    return result.name == call.name


def _output(response: dict[str, Any]) -> str:
    output = response["output"] if response.keys() == {"output"} else response
    return output if isinstance(output, str) else msgspec.json.encode(output).decode()
