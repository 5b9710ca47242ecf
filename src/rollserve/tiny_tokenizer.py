"""A byte-level BPE tokenizer of a few hundred tokens, for tests, ``rollserve bench`` and the demo's model.

It encodes any text. It has Qwen3's control tokens, so Qwen3's chat template renders with it; the
template's own long passages, and the frame of a tool schema, are single tokens (``PHRASES``), because a
prompt of 600 byte pairs before each one-line task would cost a tiny model most of its time. Single
letters (with and without the space before) and digits are single tokens.

``python -m rollserve.tiny_tokenizer FILE`` makes the checked-in file again, byte for byte.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from string import ascii_letters

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special: left out when decoding with ``skip_special_tokens``."""

MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Not special, as in Qwen3: their text is part of what the model says."""

PHRASES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"}}, "required": ["',
    '"]}}}',
    "Run a command in a persistent shell.",
    "Submit the final answer and finish.",
    '{"name": "shell", "arguments": {"command": "',
    '{"name": "submit", "arguments": {"answer": "',
    '"}}',
)
"""Text that is one token wherever it stands."""

VOCAB_SIZE = 440
EOS_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"

# Qwen's: contractions, words, single digits, punctuation, line ends, spaces
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = ["system", "user", "assistant", "shell", "command", "submit", "answer", "lookup", "cat", "see"]
_OFTEN = (
    "cat: x: No such file or directory\n[exit code 1]\n\nsh: command not found [exit code 127]",
    "error: the file is not found, is it there? the answer is\n\nyes",
    "\n\n",
)
_SELDOM = (
    "The answer is in this file. Read it and then say what you have found, with one number for each line.",
    "Which of these words can be used to make all others that are not in the list?",
    "def main(name: str) -> int:\n    return sum(x for x in range(10) if x != 3)\n",
    "It was the best of times, it was the worst of times; there were many things to do about that.",
)


def corpus() -> list[str]:
    """What the merges are learnt from."""
    letters = [f" {letter}" for letter in ascii_letters]
    return letters * 40 + _WORDS * 40 + list(_OFTEN) * 30 + list(_SELDOM) * 3


def build() -> Tokenizer:
    """Learn the merges and add the fixed tokens; the same each time."""
    made = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    fixed = len(CONTROL) + len(MARKS) + len(PHRASES)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - fixed,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(corpus(), trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*MARKS, *PHRASES)])
    return made


def tokenizer_file() -> Path:
    """The checked-in ``tokenizer.json``."""
    return Path(__file__).parent / "assets" / "tiny-tokenizer" / "tokenizer.json"


class TinyTokenizer:
    """What ``renderers`` asks of a tokenizer, over ``tokenizers`` alone (no transformers)."""

    name_or_path = "rollserve/tiny-tokenizer"
    unk_token_id: int | None = None

    def __init__(self, inner: Tokenizer | None = None) -> None:
        self.inner = inner or Tokenizer.from_file(str(tokenizer_file()))
        self.eos_token_id: int | None = self.inner.token_to_id(EOS_TOKEN)

    @property
    def vocab_size(self) -> int:
        return self.inner.get_vocab_size()

    def encode(self, text: str, *args: object, **kwargs: object) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int], *args: object, skip_special_tokens: bool = False) -> str:
        text: str = self.inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self.inner.token_to_id(tokens)
        return [self.inner.token_to_id(token) for token in tokens]

    def token_id(self, token: str) -> int:
        """Raises ``KeyError`` for text that is no single token."""
        found = self.inner.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return int(found)


def main() -> None:
    build().save(sys.argv[1] if len(sys.argv) > 1 else str(tokenizer_file()), pretty=False)


if __name__ == "__main__":
    main()
