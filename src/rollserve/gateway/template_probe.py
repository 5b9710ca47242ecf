"""Does a policy's renderer extend conversations exactly? Tried on a fixed set of them, once a policy.

For each: render a prompt, take the reply as the template itself writes it for what the model would have
sampled, extend by what comes next, and compare with the template's rendering of the whole; then read the
sampled ids back and compare with what was said. ``python -m rollserve.gateway.template_probe`` reads a
``PolicySpec`` on standard input and writes the ``TemplateFinding``: a process of its own, because a
tokenizer and ``renderers`` cost seconds and hundreds of megabytes that the server must not spend.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollserve.errors import InvalidInput
from rollserve.gateway.rendering import NATIVE_ID, Prior, Rendering
from rollserve.gateway.tokens import TextTokenizer, load_tokenizer
from rollserve.records.call import Message, ToolCall
from rollserve.records.policy import PolicySpec, RendererSpec, TemplateFinding, TemplateReport

SPECIAL_TEXTS = 64
"""Control tokens whose text is tried inside messages."""

_NICE = 10

_PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": f"{name} a file", "parameters": _PATH}}
    for name in ("read", "remove")
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``new`` follows ``reply``, which answers ``before``. ``cut``: the reply ends without its stop."""

    name: str
    before: tuple[Message, ...]
    reply: Message
    new: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    cut: bool = False


def _call(number: int, name: str, path: str) -> ToolCall:
    return ToolCall(id=_id(number, name), name=name, arguments=json.dumps({"path": path}))


def _result(number: int, text: str, name: str = "read") -> Message:
    return Message(role="tool", content=text, tool_call_id=_id(number, name))


def _id(number: int, name: str) -> str:
    """Ours, and what the model wrote: some formats carry the name there."""
    return f"call_{number}{NATIVE_ID}functions.{name}:{number - 1}"


SYSTEM = Message(role="system", content="You are terse.")
ASK = Message(role="user", content="What is in a.txt, and in b.txt?")
MORE = Message(role="user", content="Thanks. And in c.txt?")
TEXT = Message(role="assistant", content="One line each.")
THOUGHT = Message(role="assistant", content="One line each.", reasoning="They are short files.")
ONE = Message(role="assistant", tool_calls=(_call(1, "read", "a.txt"),))
ONE_THOUGHT = Message(role="assistant", reasoning="Look at it.", tool_calls=(_call(1, "read", "a.txt"),))
TWO = Message(role="assistant", tool_calls=(_call(1, "read", "a.txt"), _call(2, "read", "b.txt")))
LATER = (SYSTEM, ASK, ONE, _result(1, "first"))

CASES = (
    Case(name="user_turn", before=(SYSTEM, ASK), reply=TEXT, new=(MORE,)),
    Case(name="user_turn_without_system", before=(ASK,), reply=TEXT, new=(MORE,)),
    Case(name="user_turn_after_thinking", before=(SYSTEM, ASK), reply=THOUGHT, new=(MORE,)),
    Case(name="user_turn_after_cut", before=(SYSTEM, ASK), reply=TEXT, new=(MORE,), cut=True),
    Case(name="tool_result", before=(SYSTEM, ASK), reply=ONE, new=(_result(1, "first"),), tools=TOOLS),
    Case(
        name="tool_result_after_thinking",
        before=(SYSTEM, ASK),
        reply=ONE_THOUGHT,
        new=(_result(1, "first"),),
        tools=TOOLS,
    ),
    Case(
        name="parallel_results",
        before=(SYSTEM, ASK),
        reply=TWO,
        new=(_result(1, "first"), _result(2, "second")),
        tools=TOOLS,
    ),
    Case(name="second_turn", before=LATER, reply=TEXT, new=(MORE,), tools=TOOLS),
)


def probe_template(spec: RendererSpec, tokenizer: TextTokenizer) -> TemplateFinding:
    """Raises ``InvalidInput`` when the renderer does not fit the tokenizer."""
    return TemplateFinding(
        keep=_report(Rendering(spec, tokenizer, "keep")), strip=_report(Rendering(spec, tokenizer, "strip"))
    )


def _report(rendering: Rendering) -> TemplateReport:
    leaks = _leaks(rendering)
    if leaks:
        detail = f"text of a {leaks[0]} message can become control tokens"
        return TemplateReport(verdict="inexact", exceptions=[f"{leaks[0]}_text:differ"], detail=detail)
    found = {case.name: _try(rendering, case) for case in CASES}
    exceptions = [f"{name}:{how}" for name, each in found.items() for how in each]
    if not exceptions:
        return TemplateReport(verdict="exact")
    if all(set(each) - {"misread"} for each in found.values()):
        detail = f"nothing that was tried can be extended as the template renders it{_first(rendering)}"
        return TemplateReport(verdict="inexact", exceptions=exceptions, detail=detail)
    return TemplateReport(verdict="exceptions", exceptions=exceptions)


def _first(rendering: Rendering) -> str:
    """What the renderer itself says of the first prompt, if it refuses that."""
    try:
        rendering.render(CASES[0].before, CASES[0].tools)
    except InvalidInput as error:
        return f": {error.message}"
    return ""


How = Literal["break", "differ", "refused", "misread"]


def _try(rendering: Rendering, case: Case) -> list[How]:
    """What went wrong, nothing twice."""
    try:
        prompt = rendering.render(case.before, case.tools)
        whole = rendering.render((*case.before, case.reply, *case.new), case.tools)
        sampled = rendering.said(case.before, case.reply, case.tools, whole)
    except InvalidInput:
        return ["refused"]
    if sampled is None:
        return ["differ"]
    read = rendering.parse(sampled, case.tools, prompt).message
    wrong: list[How] = [] if _meaning(read) == _meaning(case.reply) else ["misread"]
    how = _extended(rendering, case, prompt, sampled[:-1] if case.cut else sampled, whole)
    return wrong if how is None else [how, *wrong]


def _extended(
    rendering: Rendering, case: Case, prompt: list[int], sampled: list[int], whole: list[int]
) -> How | None:
    prior = Prior(
        prompt_ids=prompt,
        sampled_ids=sampled,
        context=lambda: [*prompt, *sampled],
        conversation=(*case.before, case.reply),
    )
    try:
        gained = rendering.extend(prior, case.new, case.tools)
    except InvalidInput:
        return "refused"
    if gained is None:
        return "break"
    return None if [*prompt, *sampled, *gained] == whole else "differ"


def _meaning(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    """What must come back: blanks around a text are the template's."""
    calls = [(call.name, _arguments(call.arguments)) for call in message.tool_calls]
    return message.content.strip(), (message.reasoning or "").strip(), calls


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _leaks(rendering: Rendering) -> list[str]:
    """Roles whose text can become control tokens."""
    control = rendering.tokenizer.control_ids
    texts = [rendering.tokenizer.token_text(token_id) for token_id in sorted(control)[:SPECIAL_TEXTS]]
    special = " ".join(texts)
    shapes: dict[str, Callable[[str], Sequence[Message]]] = {
        "user": lambda text: (SYSTEM, Message(role="user", content=text)),
        "system": lambda text: (Message(role="system", content=text), ASK),
        "tool": lambda text: (SYSTEM, ASK, ONE, _result(1, text)),
    }
    return [role for role, shape in shapes.items() if _control(rendering, shape, "x", special)]


def _control(
    rendering: Rendering, shape: Callable[[str], Sequence[Message]], plain: str, special: str
) -> bool:
    """Whether there are more control ids with the one text than with the other."""
    control = rendering.tokenizer.control_ids
    counts = []
    for text in (plain, special):
        try:
            counts.append(sum(token_id in control for token_id in rendering.render(shape(text), TOOLS)))
        except InvalidInput:
            return False
    return counts[1] > counts[0]


def main() -> int:
    os.nice(_NICE)
    spec = PolicySpec.model_validate_json(sys.stdin.read())
    try:
        if spec.tokenizer is None:
            raise InvalidInput("it has no tokenizer", field="tokenizer")
        finding = probe_template(spec.renderer, load_tokenizer(spec.tokenizer))
    except InvalidInput as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(finding.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
