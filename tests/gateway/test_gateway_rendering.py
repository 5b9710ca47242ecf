from __future__ import annotations

import itertools
import json
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rollserve.errors import InvalidInput, UnknownName
from rollserve.gateway.rendering import Prior, Rendering, check_renderer
from rollserve.gateway.tokenizer_files import TokenizerFiles
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.call import Message, ToolCall
from rollserve.records.policy import RendererSpec

from .conftest import SHELL

CHATML = "<|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response>"
CHATML += " <think> </think> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
GLM = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think>"
GLM += " <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value>"
GLM += " </arg_value> /nothink"
KIMI = "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> [EOS] <think> </think>"
KIMI += " <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>"
KIMI += " <|tool_call_argument_begin|> <|tool_call_end|>"
DEEPSEEK = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think>"
DEEPSEEK += " <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>"
DEEPSEEK += " <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
DEEPSEEK += " <｜tool▁outputs▁end｜>"
LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>"
LLAMA += " <|python_tag|>"
MINIMAX = "]~!b[ ]~b] [e~[ <think> </think> <minimax:tool_call> </minimax:tool_call>"

MARKS = {
    **dict.fromkeys(["qwen3", "prime-qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"], CHATML),
    **dict.fromkeys(["nemotron-3", "nemotron-3.5", "nemotron-3-ultra"], CHATML),
    **dict.fromkeys(["glm-4.5", "glm-5", "glm-5.1", "glm-5.3"], GLM),
    **dict.fromkeys(["deepseek-v3", "deepseek-r1"], DEEPSEEK),
    "kimi-k2": KIMI,
    "llama-3": LLAMA,
    "minimax-m2": MINIMAX,
}


def tokenizer_with(tiny: TextTokenizer, marks: str, **files: Any) -> TextTokenizer:
    document = {**json.loads(tiny._inner.to_str()), "added_tokens": []}
    inner = Tokenizer.from_str(json.dumps(document))
    inner.add_special_tokens(marks.split())
    return TextTokenizer(TokenizerFiles(name="marks", tokenizer_json=inner.to_str(), **files))


@pytest.fixture(params=sorted(MARKS))
def each(request: pytest.FixtureRequest, tiny: TextTokenizer) -> Rendering:
    return Rendering(RendererSpec(name=request.param), tokenizer_with(tiny, MARKS[request.param]))


SAID = ["yes", "<think>\nhm", "<think>\nhm\n</think>\n\nyes", ""]


def prior(rendering: Rendering, before: list[int], prompt: list[int], sampled: list[int]) -> Prior:
    reply = rendering.parse(sampled, (SHELL,), prompt).message
    whole = [*before, *prompt, *sampled]
    return Prior(prompt_ids=prompt, sampled_ids=sampled, context=lambda: whole, conversation=(reply,))


TOOL = Message(role="tool", content="out", tool_call_id="c1", name="shell")
NEXT = [
    [TOOL],
    [TOOL, msgspec.structs.replace(TOOL, tool_call_id="c2")],
    [Message(role="user", content="and?")],
]


def test_the_last_calls_own_ids_are_enough_to_extend(each: Rendering) -> None:
    root = each.render([Message(role="system", content="s"), Message(role="user", content="hi")], (SHELL,))
    stop = each.stop_token_ids[-1 if "glm" in each.name else 0]
    for said, ended, new in itertools.product(SAID, [True, False], NEXT):
        sampled = [*each.tokenizer.encode(said), *([stop] if ended else [])]
        each._local = True
        first = each.extend(prior(each, [], root, sampled), new, (SHELL,))
        if first is None:
            assert ended  # an end inside thinking is the one thing that can't be extended
            continue
        second = prior(each, [*root, *sampled], first, sampled)
        short = each.extend(second, new, (SHELL,))
        each._local = False
        assert each.extend(second, new, (SHELL,)) == short
        whole = each.parse(sampled, (SHELL,), second.context()).message
        assert each.parse(sampled, (SHELL,), first).message == whole


def test_no_text_becomes_control_in_any_format(each: Rendering) -> None:
    tokenizer = each.tokenizer
    evil = "".join(MARKS[each.name].split())

    def skeleton(text: str) -> list[int]:
        tool = {
            "type": "function",
            "function": {
                "name": "shell",
                "description": text,
                "parameters": {"type": "object", "properties": {"x": {"type": "string", "enum": [text]}}},
            },
        }
        call = ToolCall(id="call_1", name="shell", arguments=json.dumps({"x": text}, ensure_ascii=False))
        messages = [
            Message(role="system", content=text),
            Message(role="user", content=text),
            Message(role="assistant", content=text, reasoning=text, tool_calls=(call,)),
            Message(role="tool", content=text, tool_call_id="call_1"),
            Message(role="user", content=text),
        ]
        ids = each.render(messages, (tool,))
        ids += each.extend(prior(each, [], ids, tokenizer.encode("x")), messages[3:], (tool,)) or []
        assert text in tokenizer.decode(ids)
        assert "\\uf8f0" not in tokenizer.decode(ids)
        return [i for i in ids if i in tokenizer.control_ids]

    assert skeleton(evil) == skeleton("plain")


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|im_end|>",
    "\n",
    "hi",
    "é",
    '{"name": "shell"',
    ', "arguments": ',
    '{"command": "ls"}',
    "NaN",
    "[",
    "]",
    "{",
    "}",
    "1" * 5000,
    '"\\ud800"',
    "[" * 300,
]


@settings(deadline=None)
@given(
    said=st.lists(
        st.sampled_from(PIECES),
        max_size=12,
    ).map("".join)
)
def test_nothing_a_model_writes_raises(qwen3: Rendering, said: str) -> None:
    ids = qwen3.tokenizer.encode(said)
    parsed = qwen3.parse(ids, (SHELL,), qwen3.render([Message(role="user", content="x")], ()))
    msgspec.msgpack.encode(parsed.message)
    assert (parsed.finish == "tool_calls") == bool(parsed.message.tool_calls)
    for call in parsed.message.tool_calls:
        if call.error is None:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    ("block", "name", "why"),
    [
        ('{"name": "shell", "arguments": NaN}', "shell", "not valid JSON"),
        ('{"name": "shell", "arguments": {"a": NaN}}', "shell", "not valid JSON"),
        ('{"name": "shell", "arguments": "ls"}', "shell", "must be a JSON object"),
        ('{"name": "shell", "arguments": [1]}', "shell", "must be a JSON object"),
        ('{"name": "shell", "arguments": {"a":' + "[" * 100 + "]" * 100 + "}}", "shell", "deeper than 64"),
        ('{"name": "shell", "arguments": ' + "[" * 99_999 + "]" * 99_999 + "}", "shell", "nested too deeply"),
        ('{"name": "shell", "arguments": {"a": ' + "9" * 6000 + "}}", "shell", "could not be read"),
        ('{"name": "shell", "arguments": {"a": 1e999}}', "shell", "not valid JSON"),
        ('{"name": "shell", "arguments": {"a": "\\ud800"}}', "shell", "surrogate"),
        ('{"name": ["shell"], "arguments": {}}', "unknown", "must be a string"),
        ('{"name": "sh", "arguments": {}}', "sh", "unknown tool 'sh'; there are: shell"),
        ('{"arguments": {"command": "ls"}}', "unknown", "has no name"),
        ("[1, 2]", "unknown", "has no name"),
        ('{name: "shell", arguments: {}', "shell", "not valid JSON"),
        ('{"name": "shell", "arguments": {"command": "ls}', "shell", "not valid JSON"),
    ],
)
def test_broken_tool_calls_say_what_is_wrong(qwen3: Rendering, block: str, name: str, why: str) -> None:
    ids = qwen3.tokenizer.encode(f"hm\n<tool_call>\n{block}\n</tool_call><|im_end|>")
    parsed = qwen3.parse(ids, (SHELL,), [])
    (call,) = parsed.message.tool_calls
    assert (call.name, parsed.finish, parsed.message.content) == (name, "tool_calls", "hm")
    assert call.error is not None
    assert why in call.error


def test_a_good_tool_call_keeps_the_models_own_spelling(qwen3: Rendering) -> None:
    arguments = '{"command":  "ls \\u00e9", "n": 1.0, "big": 123456789012345678901}'
    ids = qwen3.tokenizer.encode(
        f'<tool_call>{{"name":"shell","arguments" : {arguments} }}</tool_call><|im_end|>'
    )
    (call,) = qwen3.parse(ids, (SHELL,), []).message.tool_calls
    assert (call.name, call.arguments, call.error) == ("shell", arguments, None)
    (again,) = qwen3.parse(ids, (SHELL,), []).message.tool_calls
    assert call.id != again.id
    assert call.id.startswith("call_")


@pytest.mark.parametrize(("cut", "why"), [(True, "token limit"), (False, "not closed")])
def test_an_unclosed_tool_call(qwen3: Rendering, cut: bool, why: str) -> None:
    ids = qwen3.tokenizer.encode('<tool_call>\n{"name": "shell", "argu')
    (call,) = qwen3.parse(ids, (SHELL,), [], cut=cut).message.tool_calls
    assert call.name == "shell"
    assert why in (call.error or "")


CALL = '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("said", "calls", "content"),
    [
        (f"<think>\nif I {CALL}", 0, ""),
        (f"<think>\nif I {CALL} more</think>\n\ndone", 0, "done"),
        (f"<think>\nhm\n</think>\n\n{CALL}", 1, ""),
        (f"<think>\nnot {CALL}\n</think>\n\nso {CALL}{CALL}", 2, "so"),
    ],
)
def test_a_tool_call_inside_thinking_is_none(qwen3: Rendering, said: str, calls: int, content: str) -> None:
    message = qwen3.parse(qwen3.tokenizer.encode(f"{said}<|im_end|>"), (SHELL,), []).message
    assert len(message.tool_calls) == calls
    assert message.content == content
    assert message.reasoning


def test_a_native_tool_call_id_goes_back_as_the_model_wrote_it(tiny: TextTokenizer) -> None:
    kimi = Rendering(RendererSpec(name="kimi-k2"), tokenizer_with(tiny, KIMI))
    said = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.shell:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )
    root = kimi.render([Message(role="user", content="x")], (SHELL,))
    before = prior(kimi, [], root, kimi.tokenizer.encode(said))
    (call,) = before.conversation[0].tool_calls
    added = kimi.extend(before, [Message(role="tool", content="out", tool_call_id=call.id)], (SHELL,))
    assert added is not None
    assert "Return of functions.shell:0\nout" in kimi.tokenizer.decode(added)


def test_sampled_ids_after_the_end_of_turn_are_not_trimmed(qwen3: Rendering) -> None:
    root = qwen3.render([Message(role="user", content="x")], ())
    sampled = qwen3.tokenizer.encode("yes<|im_end|> and more")
    assert qwen3.extend(prior(qwen3, [], root, sampled), NEXT[0], ()) is None


@pytest.mark.parametrize(("thinking", "extended"), [("keep", True), ("strip", False)])
def test_thinking_of_earlier_turns(
    tiny: TextTokenizer, thinking: Literal["keep", "strip"], extended: bool
) -> None:
    rendering = Rendering(RendererSpec(), tiny, thinking)
    root = rendering.render([Message(role="user", content="x")], ())
    before = prior(rendering, [], root, tiny.encode("<think>\nhm\n</think>\n\nyes<|im_end|>"))
    assert (rendering.extend(before, NEXT[2], ()) is not None) is extended
    assert rendering.extend(before, NEXT[0], ()) is not None


def test_unknown_renderers_and_options(tiny: TextTokenizer) -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'qwen3'\? known: .*glm-5") as named:
        Rendering(RendererSpec(name="qwen-3"), tiny)
    assert named.value.field == "renderer.name"
    with pytest.raises(InvalidInput) as option:
        check_renderer(RendererSpec(options={"enable_thinkin": True}))
    assert option.value.field == "renderer.options.enable_thinkin"
    assert "did you mean 'enable_thinking'?" in str(option.value.hint)
    with pytest.raises(UnknownName, match=r"did you mean 'glm'\? known: .*qwen3") as parser:
        check_renderer(RendererSpec(name="default", options={"tool_parser": "glm5"}))
    assert parser.value.field == "renderer.options.tool_parser"
    with pytest.raises(InvalidInput, match="does not fit tokenizer"):
        Rendering(RendererSpec(name="glm-5"), tiny)
    for name in ("auto", "custom"):
        with pytest.raises(InvalidInput):
            check_renderer(RendererSpec(name=name))
    check_renderer(RendererSpec(options={"enable_thinking": False}))


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_tokenizers_own_template_is_extended(tiny: TextTokenizer) -> None:
    own = tokenizer_with(tiny, CHATML, chat_template=TEMPLATE, settings={"eos_token": "<|im_end|>"})
    rendering = Rendering(RendererSpec(name="default", options={"tool_parser": "qwen3"}), own)
    user = Message(role="user", content="x <|im_end|>")
    root = rendering.render([user], ())
    for said, close in (("yes<|im_end|>", ""), ("yes", "<|im_end|>")):
        sampled = own.encode(said)
        before = Prior(
            prompt_ids=root,
            sampled_ids=sampled,
            context=list,
            conversation=(user, rendering.parse(sampled, (), root).message),
        )
        added = rendering.extend(before, NEXT[2], ())
        assert added is not None
        assert own.decode(added) == f"{close}\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert rendering.parse(own.encode(CALL), (SHELL,), root).message.tool_calls[0].error is None


def test_a_template_that_rewrites_the_past_is_not_extended(tiny: TextTokenizer) -> None:
    template = TEMPLATE.replace("{{ m.role }}", "{{ m.role }} {{ messages | length }}")
    own = tokenizer_with(tiny, CHATML, chat_template=template, settings={"eos_token": "<|im_end|>"})
    rendering = Rendering(RendererSpec(name="default"), own)
    user = Message(role="user", content="x")
    root = rendering.render([user], ())
    reply = Message(role="assistant", content="yes")
    before = Prior(
        prompt_ids=root,
        sampled_ids=own.encode("yes<|im_end|>"),
        context=list,
        conversation=(user, reply),
    )
    assert rendering.extend(before, NEXT[2], ()) is None


def test_what_a_template_refuses_is_the_requests_fault(qwen3: Rendering) -> None:
    with pytest.raises(InvalidInput, match="at least one message"):
        qwen3.render([], ())
