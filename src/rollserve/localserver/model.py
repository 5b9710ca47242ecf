"""The transformers model behind two calls: run prompts through a range of slots, and run one token each.

Any causal language model whose attention is a plain cache of keys and values works. Models with
recurrent layers, or with sliding windows shorter than the context served, are refused at start-up.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from rollserve.errors import ConfigError
from rollserve.localserver.cache import SlotCache

_PREFILL_CHUNK = 1024
_SCORE_CHUNK = 64
"""Positions whose logits over the whole vocabulary are in memory at once."""


def load_model(directory: str, *, device: str, dtype: str) -> torch.nn.Module:
    """Load a Hugging Face directory for inference; nothing is downloaded."""
    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(
            f"{directory} is no Hugging Face model directory: config.json is missing", field="model"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available to PyTorch", field="device", hint="use --device cpu")
    cast("Any", transformers.utils.logging).disable_progress_bar()
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    )
    return model.to(device).eval().requires_grad_(False)


def eos_ids(model: Any) -> frozenset[int]:
    """What ends an answer according to the model's generation config."""
    config: GenerationConfig = model.generation_config
    found = config.eos_token_id
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


class BatchModel:
    """Slots ``first:last`` of the running batch forward, giving next-token logits ``[rows, vocabulary]``."""

    def __init__(self, model: torch.nn.Module, *, max_batch: int, max_model_len: int | None = None) -> None:
        self.module = model
        config = cast("Any", model.config).get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_model_len = _context(config, max_model_len)
        self.max_batch = max_batch
        self.device = next(model.parameters()).device
        self.eos_ids = eos_ids(model)
        self._cache = SlotCache(config.num_hidden_layers, max_batch, self.max_model_len)
        accepted = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.2x and warns about the old name later on
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._keeps_logits = "logits_to_keep" in accepted

    @torch.inference_mode()
    def prefill(self, first: int, prompts: Seq[Seq[int]]) -> torch.Tensor:
        """Run whole prompts through slots ``first:first+len(prompts)``, padded on the right.

        A padded position writes keys that the next real token of its row overwrites, and that the
        mask hides until then.
        """
        longest = max(map(len, prompts))
        self._cache.reserve(first + len(prompts), longest + 1)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.as_tensor(prompt)
        ids = ids.to(self.device)
        ends = [len(prompt) - 1 for prompt in prompts]
        found: dict[int, torch.Tensor] = {}
        for start in range(0, longest, _PREFILL_CHUNK):
            end = min(longest, start + _PREFILL_CHUNK)
            here = [row for row, last in enumerate(ends) if start <= last < end]
            keep = sorted({ends[row] - start for row in here})
            logits = self._chunk(first, ids, start, end, keep)
            found.update({row: logits[row, keep.index(ends[row] - start)] for row in here})
        return torch.stack([found[row] for row in range(len(prompts))]).float()

    @torch.inference_mode()
    def score(self, slot: int, prompt: Seq[int]) -> list[float]:
        """The logprob of each token but the first, given those before it. Uses the slot's cache."""
        self._cache.reserve(slot + 1, len(prompt) + 1)
        ids = torch.as_tensor(list(prompt), dtype=torch.long)[None].to(self.device)
        found: list[float] = []
        for start in range(0, len(prompt) - 1, _SCORE_CHUNK):
            end = min(len(prompt) - 1, start + _SCORE_CHUNK)
            logits = self._chunk(slot, ids, start, end, list(range(end - start)))[0].float()
            logprobs = torch.log_softmax(logits, dim=-1)
            found += logprobs.gather(1, ids[0, start + 1 : end + 1, None])[:, 0].tolist()
        return found

    def _chunk(self, first: int, ids: torch.Tensor, start: int, end: int, keep: list[int]) -> torch.Tensor:
        window = self._cache.window
        window.first, window.last, window.start, window.end = first, first + ids.shape[0], start, end
        window.positions = window.rows = None
        rows = ids.shape[0]
        mask = torch.ones(end - start, end, dtype=torch.bool, device=self.device).tril(diagonal=start)
        positions = torch.arange(start, end, device=self.device).expand(rows, -1)
        return self._forward(
            ids[:, start:end], positions, mask[None, None].expand(ids.shape[0], -1, -1, -1), keep
        )

    @torch.inference_mode()
    def decode(self, last_ids: Seq[int], lengths: Seq[int]) -> torch.Tensor:
        """One step of slots ``0:len(last_ids)``; ``lengths`` counts each row's tokens, the last included."""
        end = max(lengths)
        self._cache.reserve(len(last_ids), end)
        positions = torch.tensor(lengths, device=self.device) - 1
        window = self._cache.window
        window.first, window.last, window.start, window.end = 0, len(last_ids), 0, end
        window.positions, window.rows = positions, torch.arange(len(last_ids), device=self.device)
        mask = torch.arange(end, device=self.device)[None, :] <= positions[:, None]
        ids = torch.tensor(last_ids, device=self.device)[:, None]
        return self._forward(ids, positions[:, None], mask[:, None, None], [0])[:, 0].float()

    def move(self, source: int, target: int, length: int) -> None:
        with torch.inference_mode():
            self._cache.move(source, target, length)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, keep: list[int]
    ) -> torch.Tensor:
        """Logits ``[rows, len(keep), vocabulary]`` of the named columns."""
        wanted = torch.tensor(keep or [0], device=self.device)
        extra: dict[str, Any] = {self._cache_name: self._cache.hf}
        if self._keeps_logits:
            extra["logits_to_keep"] = wanted
        answer = self.module(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **extra
        )
        logits: torch.Tensor = answer.logits
        return logits if self._keeps_logits else logits[:, wanted]


def _context(config: Any, asked: int | None) -> int:
    """The context to serve: what was asked for, or the model's own."""
    own = int(getattr(config, "max_position_embeddings", 0) or 2048)
    if asked is not None and not 2 <= asked <= own:
        raise ConfigError(f"{asked} is out of range: the model has {own} positions", field="max_model_len")
    served = asked or own
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(f"layers of kind {sorted(unknown)} are not supported by this server", field="model")
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window and window < served:
        raise ConfigError(
            f"the model attends to {window} tokens only; this server has no sliding window",
            field="max_model_len",
            hint=f"serve it with --max-model-len {window} or less",
        )
    return served
