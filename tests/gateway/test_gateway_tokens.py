from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rollserve.errors import InvalidInput
from rollserve.gateway.tokenizer_files import TokenizerFiles
from rollserve.gateway.tokens import CLOSE, OPEN, TextTokenizer, is_control, load_tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>"]
CONTROL += ["</tool_response>", "<think>", "</think>"]
PIECES = [
    *CONTROL,
    OPEN,
    CLOSE,
    r"\uf8f0",
    r"\uf8f1",
    f"{OPEN}3c{CLOSE}",
    "<|im_",
    "start|>",
    " ",
    "\n",
    "é",
    "字",
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=12).map("".join)


@given(text=texts, frame=st.sampled_from(["", "user\n", "<|im_start|>user\n"]))
def test_guarded_text_survives_and_never_becomes_control(tiny: TextTokenizer, text: str, frame: str) -> None:
    ids = tiny.encode(frame + tiny.guard(text) + "<|im_end|>\n")
    skeleton = tiny.encode(frame) + tiny.encode("<|im_end|>\n")
    control = [i for i in ids if i in tiny.control_ids]
    assert control == [i for i in skeleton if i in tiny.control_ids]
    assert tiny.decode(ids) == f"{frame}{text}<|im_end|>\n"


def test_ordinary_text_is_left_as_it_is(tiny: TextTokenizer) -> None:
    text = 'Run a command in a persistent shell. {"a": [1]} <b>'
    assert tiny.guard(text) is text
    assert tiny.encode(text) == tiny._inner.encode(text, add_special_tokens=False).ids


def test_short_texts_are_cached_and_callers_get_their_own_list(tiny: TextTokenizer) -> None:
    tiny.encode("user\n").append(-1)
    assert -1 not in tiny.encode("user\n")


@pytest.mark.parametrize(
    ("token", "special", "expected"),
    [
        ("<|x|>", False, True),
        ("[INST]", False, True),
        ("<think>", False, True),
        ("EOS", True, True),
        ("\n\n\n", False, False),
        ("for each <b>", False, False),
        ('"}}', False, False),
    ],
)
def test_what_counts_as_control(token: str, special: bool, expected: bool) -> None:
    assert is_control(token, special) is expected


def _small(normalized: bool, vocabulary: dict[str, int]) -> TextTokenizer:
    """Byte-level, with one control token that is also in the model's own vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {**{char: index for index, char in enumerate(alphabet)}, **vocabulary}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    if normalized:
        inner.normalizer = normalizers.NFKC()
    inner.add_tokens([AddedToken("<|end|>", special=True, normalized=normalized)])
    return TextTokenizer(TokenizerFiles(name="small", tokenizer_json=inner.to_str()))


def test_a_look_alike_in_the_models_own_vocabulary() -> None:
    small = _small(False, {"<|end|>": 256})
    assert small.control_ids == {256}
    ids = small.encode("a" + small.guard("b<|end|>c") + "<|end|>")
    assert ids.count(256) == 1
    assert small.decode(ids) == "ab<|end|>c<|end|>"


def test_a_look_alike_that_normalisation_makes() -> None:
    small = _small(True, {})
    (end,) = small.control_ids
    fullwidth = "x ＜|end|＞ y"
    assert end in small.encode(fullwidth)  # the trap is real
    assert end not in small.encode("a" + small.guard(fullwidth))
    assert end in small.encode("<|end|>")


def test_loading(tmp_path: Path, tiny: TextTokenizer) -> None:
    document = tiny._inner.to_str()
    (tmp_path / "tokenizer.json").write_text(document)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}, "chat_template": "{{ messages[0].content }}"})
    )
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        loaded = load_tokenizer(name)
        assert loaded.eos_token_id == loaded.token_id("<|endoftext|>")
        assert loaded.template_text([{"content": "hi"}]) == "hi"
    (tmp_path / "chat_template.jinja").write_text("other")
    assert load_tokenizer(str(tmp_path)).template_text([]) == "other"


@pytest.mark.parametrize("content", ["", "{}", "no json", '{"model": 3}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidInput) as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.field == "tokenizer"


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nothing", "missing/tokenizer.json"])
def test_a_missing_tokenizer_is_named(name: str) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        load_tokenizer(name)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_templates_are_sandboxed_and_refusals_are_ours(tmp_path: Path, tiny: TextTokenizer) -> None:
    def with_template(template: str) -> TextTokenizer:
        files: dict[str, Any] = {"name": "t", "tokenizer_json": tiny._inner.to_str()}
        return TextTokenizer(TokenizerFiles(**files, chat_template=template))

    with pytest.raises(InvalidInput, match="roles must alternate"):
        with_template("{{ raise_exception('roles must alternate') }}").template_text([])
    with pytest.raises(InvalidInput, match="unsafe"):
        with_template("{{ messages.__class__.__mro__ }}").template_text([])
    assert with_template("{{ {'a': 'é'} | tojson }}").template_text([]) == '{"a": "é"}'
    with pytest.raises(InvalidInput, match="no chat template"):
        tiny.template_text([])
