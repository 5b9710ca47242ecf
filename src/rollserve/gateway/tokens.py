"""The one door to ``tokenizers``: load a tokenizer, and encode text so that no text of a message can
become a control token.

A message's text may hold what looks like a control token (``<|im_start|>``, ``<tool_call>``). Chat
templates join such text with their own frame before they encode, so the frame's real control tokens
and the look-alikes can't be told apart afterwards. ``guard`` therefore replaces a look-alike, before
rendering, by ``OPEN hex(utf-8) CLOSE`` (two private-use characters; where they occur in the text
themselves they are replaced too, so that after ``guard`` each one is ours), and ``encode`` encodes
what is between them with a second tokenizer that knows no added tokens. Text without look-alikes costs
one compiled search.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollserve.errors import InvalidInput
from rollserve.gateway.recent import RecentIds
from rollserve.gateway.template import ChatTemplate
from rollserve.gateway.tokenizer_files import TokenizerFiles, read_files

OPEN, CLOSE = "\uf8f0", "\uf8f1"
_ESCAPED = (r"\uf8f0", r"\uf8f1")
"""The two as JSON escapes: some templates dump parts of a tool's schema that way."""

_GUARDED = re.compile(rf"(?:{OPEN}|\\uf8f0)([0-9a-f]*)(?:{CLOSE}|\\uf8f1)")
_MARKUP = re.compile(r"[<\[]\S*[>\]]", re.DOTALL)
_CACHED_CHARS = 32
_LONG_CHARS = 4096
_CACHED_TEXTS = 1024
_RECENT_IDS = 1 << 20
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>", "<eos>")


def is_control(token: str, special: bool) -> bool:
    """Whether an added token carries structure: it is special, or reads like markup. Other added
    tokens (runs of blanks, frequent phrases) are ordinary text."""
    return special or _MARKUP.fullmatch(token) is not None


class TextTokenizer:
    """What ``renderers`` asks of a tokenizer, over ``tokenizers`` alone, with guarded text.

    It has no ``__call__`` with offsets on purpose: we need no content masks, and they cost an extra
    encoding a segment.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.name_or_path = files.name
        self._template = None if files.chat_template is None else ChatTemplate(files.chat_template)
        self.settings = files.settings
        document = json.loads(files.tokenizer_json)
        self._inner = Tokenizer.from_str(files.tokenizer_json)
        self._inner.no_truncation()
        self._inner.no_padding()
        self._plain = Tokenizer.from_str(json.dumps({**document, "added_tokens": [], "post_processor": None}))
        self._plain.no_truncation()
        self._plain.no_padding()
        added = document.get("added_tokens") or []
        control = {t["content"]: t["id"] for t in added if is_control(t["content"], bool(t.get("special")))}
        self.control_ids = frozenset(control.values())
        self._added = frozenset(t["content"] for t in added)
        self._lookalike = re.compile(
            "|".join(map(re.escape, [*sorted(control, key=len, reverse=True), OPEN, CLOSE, *_ESCAPED]))
        )
        # A token marked ``normalized`` is looked for in the normalised text: full-width letters may
        # become one there.
        self._normalizes = self._inner.normalizer is not None and any(
            t.get("normalized") and t["content"] in control for t in added
        )
        self.longest_token = _longest_token(self._inner, document)
        self._cache: dict[str, list[int]] = {}
        self._recent = RecentIds(_RECENT_IDS)
        self._spelled: dict[int, str] = {}
        self.unk_token_id = self._token_setting("unk_token")
        self.eos_token_id = self._token_setting("eos_token")
        if self.eos_token_id is None:
            known = (self._inner.token_to_id(token) for token in _END_TOKENS)
            self.eos_token_id = next((token_id for token_id in known if token_id is not None), None)

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size()

    @property
    def all_special_tokens(self) -> list[str]:
        return [t.content for t in self._inner.get_added_tokens_decoder().values() if t.special]

    def _token_setting(self, name: str) -> int | None:
        value = self.settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        return self._inner.token_to_id(text) if isinstance(text, str) else None

    def guard(self, text: str) -> str:
        """``text`` with every look-alike replaced, see the module's head."""
        guarded = self._lookalike.sub(_replace, text) if self._lookalike.search(text) else text
        if self._normalizes:
            rest: str = self._inner.normalizer.normalize_str(_GUARDED.sub("", guarded))
            if self._lookalike.search(rest):
                return _wrap(text)
        return guarded

    def encode(self, text: str, *args: object, **kwargs: object) -> list[int]:
        """Token ids of template text with guarded stretches in it."""
        short = len(text) <= _CACHED_CHARS
        if short and (known := self._cache.get(text)) is not None:
            return known.copy()
        if not short and (recent := self._recent.get(text)) is not None:
            return recent.list
        ids = self._encode_guarded(text) if OPEN in text or _ESCAPED[0] in text else self._encode(text)
        if not short:
            self._recent.put(text, ids)
        elif len(self._cache) < _CACHED_TEXTS:
            self._cache[text] = ids.copy()
        return ids

    def _encode(self, text: str) -> list[int]:
        return _encoded(self._inner, text)

    def _encode_guarded(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for found in _GUARDED.finditer(text):
            if found.start() > at:
                ids += self._encode(text[at : found.start()])
            ids += self.encode_plain(bytes.fromhex(found[1]).decode())
            at = found.end()
        if at < len(text):
            ids += self._encode(text[at:])
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text that is only text. A model that has a look-alike in its own vocabulary gets it
        in smaller pieces."""
        ids = _encoded(self._plain, text)
        if len(text) < 2 or self.control_ids.isdisjoint(ids):
            return ids
        middle = len(text) // 2
        return self.encode_plain(text[:middle]) + self.encode_plain(text[middle:])

    def decode(self, token_ids: Sequence[int], *args: object, skip_special_tokens: bool = False) -> str:
        text: str = self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self.token_id(tokens)
        return [self.token_id(token) for token in tokens]

    def token_id(self, token: str) -> int | None:
        found = self._inner.token_to_id(token)
        return self.unk_token_id if found is None else int(found)

    def token_text(self, token_id: int) -> str:
        """Of the vocabulary's ids, each is decoded once."""
        known = self._spelled.get(token_id)
        if known is None:
            known = self.decode([token_id])
            if len(self._spelled) < self.vocab_size:
                self._spelled[token_id] = known
        return known

    def token_bytes(self, token_ids: Sequence[int]) -> bytes | None:
        """What the tokens stand for, byte by byte, also where that is half a character; None for an id
        that is no token's."""
        spelled = _spelled_bytes if self._inner.token_to_id("<0x0A>") is not None else _alphabet_bytes
        parts = []
        for token in map(self._inner.id_to_token, token_ids):
            if token is None:
                return None
            parts.append(token.encode() if token in self._added else spelled(token))
        return b"".join(parts)

    def apply_chat_template(self, messages: Sequence[Any], **kwargs: Any) -> list[int]:
        """Ids of the tokenizer's own template (for ``DefaultRenderer``). Raises ``InvalidInput``."""
        return self.encode(self.template_text(messages, **kwargs))

    def template_text(self, messages: Sequence[Any], **kwargs: Any) -> str:
        if self._template is None:
            raise InvalidInput(
                f"tokenizer {self.name_or_path!r} has no chat template",
                field="renderer.name",
                hint="name a renderer such as 'qwen3', or add chat_template.jinja to its directory",
            )
        ignored = ("tokenize", "return_dict")
        variables = {**_special_texts(self.settings), **kwargs, "messages": messages}
        return self._template.render({k: v for k, v in variables.items() if k not in ignored})

    def stream(self) -> TextStream:
        return TextStream(self._inner)


class TextStream:
    """Text of ids that come one after another; never half a character."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self._stream = DecodeStream(skip_special_tokens=False)

    def push(self, ids: Sequence[int]) -> str:
        """What they add. Whole characters behind which half of one stands wait for it."""
        return self._stream.step(self._inner, ids if len(ids) > 1 else ids[0]) or ""


def _encoded(inner: Tokenizer, text: str) -> list[int]:
    """Only a batch lets other threads run meanwhile; for short text it costs more."""
    if len(text) > _LONG_CHARS:
        ids: list[int] = inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
    else:
        ids = inner.encode(text, add_special_tokens=False).ids
    return ids


def _longest_token(inner: Tokenizer, document: dict[str, Any]) -> int | None:
    """Characters that one token stands for at most; None where an unknown word of any length is one."""
    model = document.get("model") or {}
    unknown = model.get("unk_token") is not None or model.get("unk_id") is not None
    if unknown and not model.get("byte_fallback"):
        return None
    return max(map(len, inner.get_vocab()), default=None)


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: printable ones of Latin-1 for themselves,
    the others from U+0100 on, in order (Radford et al., GPT-2)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet_bytes(token: str) -> bytes:
    return b"".join(
        bytes([_BYTES[character]]) if character in _BYTES else character.encode() for character in token
    )


def _spelled_bytes(token: str) -> bytes:
    """SentencePiece with byte fallback."""
    found = _FALLBACK.fullmatch(token)
    return bytes.fromhex(found[1]) if found else token.replace("\u2581", " ").encode()


def _wrap(text: str) -> str:
    return f"{OPEN}{text.encode().hex()}{CLOSE}"


def _replace(found: re.Match[str]) -> str:
    return _wrap(found[0])


def _special_texts(settings: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, as templates name them."""
    texts: dict[str, str] = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[name] = text
    return texts


def load_tokenizer(name: str) -> TextTokenizer:
    """``name``: ``tiny`` (shipped), a directory, a ``tokenizer.json``, or a hub name. Slow (up to
    seconds for a large vocabulary): call it off the event loop. Raises ``InvalidInput`` (field
    ``tokenizer``)."""
    files = read_files(name)
    try:
        return TextTokenizer(files)
    except Exception as error:  # the Rust library raises bare Exception for a broken file
        raise InvalidInput(f"{name!r} is no tokenizer.json: {error}", field="tokenizer") from error
