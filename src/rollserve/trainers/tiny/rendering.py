"""Conversation → tokens, in the same way as the service: Qwen3's template, extended turn by turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from renderers import Qwen3RendererConfig, create_renderer

from rollserve.tiny_tokenizer import EOS_TOKEN, TinyTokenizer
from rollserve.trainers.tiny.task import SHELL_TOOL


class Rendering:
    """``tools`` are the schemas that the prompt will hold; the service's own must be given here when
    they differ from the default."""

    def __init__(self, tools: Sequence[dict[str, Any]] = (SHELL_TOOL,)) -> None:
        self.tokenizer = TinyTokenizer()
        self.eos_id = self.tokenizer.token_id(EOS_TOKEN)
        self._tools: Any = list(tools)
        self._renderer = create_renderer(self.tokenizer, Qwen3RendererConfig(enable_thinking=False))

    def prompt(self, instruction: str) -> list[int]:
        """Tokens up to where the model's first turn begins."""
        messages: Any = [{"role": "user", "content": instruction}]
        return list(self._renderer.render_ids(messages, tools=self._tools, add_generation_prompt=True))

    def extend(self, prompt: list[int], sampled: list[int], output: str) -> list[int]:
        """Tokens up to the next turn, after the tool answered ``output``."""
        message: Any = {"role": "tool", "name": "shell", "tool_call_id": "call", "content": output}
        bridged = self._renderer.bridge_to_next_turn(prompt, sampled, [message], tools=self._tools)
        if bridged is None:
            raise ValueError("this turn can't be extended")
        return list(bridged.token_ids)

    def call(self, command: str) -> list[int]:
        """What the model samples to run ``command``."""
        body = json.dumps({"name": "shell", "arguments": {"command": command}})
        return [*self.tokenizer.encode(f"<tool_call>\n{body}\n</tool_call>"), self.eos_id]

    def final(self, text: str) -> list[int]:
        """What the model samples to end the episode with ``text``."""
        return [*self.tokenizer.encode(text), self.eos_id]

    def parse(self, sampled: list[int]) -> tuple[str | None, str]:
        """``(command, text)`` of a turn: the command of a well-formed shell call, or None."""
        parsed = self._renderer.parse_response(sampled)
        for call in parsed.tool_calls:
            arguments = call.arguments
            if call.status.value == "ok" and call.name == "shell" and isinstance(arguments, dict):
                command = arguments.get("command")
                if isinstance(command, str):
                    return command, parsed.content
        return None, parsed.content
