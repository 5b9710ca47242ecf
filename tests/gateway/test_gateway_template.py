"""What the probe finds of a renderer, and of a template that breaks what it promises."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollserve.errors import InvalidInput
from rollserve.gateway.template_probe import CASES, probe_template
from rollserve.gateway.tokenizer_files import TokenizerFiles
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.policy import RendererSpec, TemplateReport

from .test_gateway_rendering import MARKS, tokenizer_with

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}'
    "\n</tool_call>{% endfor %}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(tiny: TextTokenizer, template: str) -> TextTokenizer:
    document = tiny._inner.to_str()
    return TextTokenizer(TokenizerFiles(name="own", tokenizer_json=document, chat_template=template))


def own(tiny: TextTokenizer, template: str) -> TemplateReport:
    spec = RendererSpec(name="default", options={"tool_parser": "qwen3"})
    return probe_template(spec, with_template(tiny, template)).keep


def test_an_append_only_template_of_its_own_is_exact_where_it_shows_everything(tiny: TextTokenizer) -> None:
    found = own(tiny, CHATML)
    assert found.verdict == "exceptions"
    assert {each.partition(":")[2] for each in found.exceptions} == {"misread"}  # it drops reasoning
    assert all("thinking" in each for each in found.exceptions)


def test_a_template_whose_calls_are_no_json_is_found(tiny: TextTokenizer) -> None:
    found = own(tiny, CHATML.replace("|tojson", ""))
    assert {"tool_result:misread", "parallel_results:misread"} <= set(found.exceptions)


def test_a_template_that_counts_messages_is_inexact(tiny: TextTokenizer) -> None:
    """The past changes with what follows."""
    found = own(tiny, "{{ messages|length }} messages\n" + CHATML)
    assert found.verdict == "inexact"
    assert "nothing that was tried can be extended" in found.detail
    assert {each.rpartition(":")[0] for each in found.exceptions} == {case.name for case in CASES}


def test_a_tokenizer_without_a_template_says_so(tiny: TextTokenizer) -> None:
    found = probe_template(RendererSpec(name="default"), tiny).strip
    assert found.verdict == "inexact"
    assert "has no chat template" in found.detail


def test_text_that_can_become_control_tokens_is_inexact(
    tiny: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unguarded(TextTokenizer):
        def guard(self, text: str) -> str:
            return text

    document = tiny._inner.to_str()
    leaky = Unguarded(TokenizerFiles(name="leaky", tokenizer_json=document))
    found = probe_template(RendererSpec(), leaky).keep
    assert (found.verdict, found.exceptions) == ("inexact", ["user_text:differ"])
    assert "control tokens" in found.detail


def test_a_new_user_message_that_strips_thinking_is_an_exception(tiny: TextTokenizer) -> None:
    found = probe_template(RendererSpec(), tiny)
    assert found.strip.verdict == found.keep.verdict == "exceptions"
    assert "user_turn_after_thinking:break" in found.strip.exceptions
    assert "user_turn_after_thinking:break" not in found.keep.exceptions
    for each in (found.keep, found.strip):
        assert not any(word.startswith("tool_result_after_thinking") for word in each.exceptions)


@pytest.mark.parametrize("name", sorted(MARKS))
def test_every_renderer_can_be_probed(tiny: TextTokenizer, name: str) -> None:
    found = probe_template(RendererSpec(name=name), tokenizer_with(tiny, MARKS[name]))
    words = {f"{case.name}:{how}" for case in CASES for how in ("break", "differ", "refused", "misread")}
    for report in (found.keep, found.strip):
        assert set(report.exceptions) <= words
        assert (report.verdict == "exact") == (not report.exceptions)


@pytest.mark.parametrize("name", ["kimi-k2", "deepseek-v3", "qwen3-vl"])
def test_conversations_without_thinking_are_exact(tiny: TextTokenizer, name: str) -> None:
    found = probe_template(RendererSpec(name=name), tokenizer_with(tiny, MARKS[name])).keep
    assert {each.rpartition(":")[0] for each in found.exceptions} <= {
        "user_turn_after_thinking",
        "tool_result_after_thinking",
    }


def test_a_renderer_that_does_not_fit_is_no_finding(tiny: TextTokenizer) -> None:
    document: dict[str, Any] = {**json.loads(tiny._inner.to_str()), "added_tokens": []}
    bare = TextTokenizer(TokenizerFiles(name="bare", tokenizer_json=json.dumps(document)))
    with pytest.raises(InvalidInput):
        probe_template(RendererSpec(name="kimi-k2"), bare)
