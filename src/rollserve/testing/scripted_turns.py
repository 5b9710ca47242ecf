"""The replies of a scripted episode, encoded once a turn: an answer costs a few string joins."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollserve.testing.scripted import Chunk, Reply, by_turn, logprob_of
from rollserve.testing.scripted_bodies import choice_of
from rollserve.tiny_tokenizer import TinyTokenizer


class Turns:
    """The replies of an episode, and which of them a prompt asks for."""

    def __init__(self, each: Sequence[Reply], header_ids: Sequence[int]) -> None:
        self.each = tuple(each)
        self.script = by_turn(each, header_ids)
        self._pattern = b"," + b",".join(str(token_id).encode() for token_id in header_ids) + b","
        self._choices: dict[tuple[int, str | None], bytes] = {}
        self._whole: dict[tuple[int, ...], bool] = {}

    def whole(self, stop_ids: tuple[int, ...]) -> bool:
        """Whether no reply is cut short by these."""
        if stop_ids not in self._whole:
            inner = {token_id for reply in self.each for token_id in reply.token_ids[:-1]}
            self._whole[stop_ids] = inner.isdisjoint(stop_ids)
        return self._whole[stop_ids]

    def index(self, raw_ids: bytes) -> int:
        """Of the reply, from a JSON list without spaces. The one before the first id is never the
        header, as a comma must stand before it."""
        headers = (b"," + raw_ids[1:-1] + b",").count(self._pattern)
        return min(max(headers - 1, 0), len(self.each) - 1)

    def choices(self, index: int, label: str | None) -> bytes:
        """The encoded ``choices`` of a whole answer, made once."""
        key = (index, label)
        if key not in self._choices:
            ids = list(self.each[index].token_ids)
            logprobs = [logprob_of(token_id) for token_id in ids]
            chunk = Chunk(ids, logprobs, label, self.each[index].finish_reason)
            self._choices[key] = msgspec.json.encode([choice_of(chunk, 0)])
        return self._choices[key]


def episode(
    *,
    turns: int,
    tokens: int,
    tool: str,
    arguments: str,
    final_text: str = "done",
    final_tool: str | None = None,
    final_arguments: str = "{}",
) -> Turns:
    """``turns`` replies of about ``tokens`` tokens each in the tiny tokenizer's ids and Qwen3's format:
    a call of ``tool`` in each but the last, which is ``final_text`` or a call of ``final_tool``."""
    tokenizer = TinyTokenizer()
    filler = tokenizer.encode(" the file is not found;")

    def reply(ending: str) -> Reply:
        end = tokenizer.encode(f"{ending}<|im_end|>")
        padding = (filler * (tokens // len(filler) + 1))[: max(0, tokens - len(end))]
        return Reply(token_ids=(*padding, *end))

    def call(name: str, text: str) -> str:
        return f'\n<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'

    last = call(final_tool, final_arguments) if final_tool else f" {final_text}"
    each = [*(reply(call(tool, arguments)) for _ in range(turns - 1)), reply(last)]
    return Turns(each, tokenizer.encode("<|im_start|>assistant"))
