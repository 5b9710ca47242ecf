"""Make, save and score the tiny model. Qwen3's architecture, loadable by transformers and by vLLM."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollserve.tiny_tokenizer import EOS_TOKEN, PAD_TOKEN, TinyTokenizer, tokenizer_file


@dataclass(frozen=True, slots=True)
class ModelSize:
    """``head_size`` is one that vLLM's CPU attention has a kernel for."""

    hidden: int = 96
    layers: int = 2
    heads: int = 3
    kv_heads: int = 3
    head_size: int = 32
    mlp: int = 192
    context: int = 1024


def make_model(size: ModelSize = ModelSize(), *, seed: int = 0) -> Qwen3ForCausalLM:
    """A fresh model for the tiny tokenizer, in float32.

    The embeddings are not tied: vLLM 0.32 leaves a tied output layer at its old weights when it
    reloads on the CPU.
    """
    tokenizer = TinyTokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        max_position_embeddings=size.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_id(EOS_TOKEN),
        pad_token_id=tokenizer.token_id(PAD_TOKEN),
        initializer_range=size.hidden**-0.5 / 2,
    )
    return Qwen3ForCausalLM(config)


def save_model(model: PreTrainedModel, directory: Path) -> None:
    """A Hugging Face directory: config, generation config, weights, tokenizer. ``model`` is a
    ``Qwen3ForCausalLM``, however it was loaded."""
    cast("Any", transformers.utils.logging).disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = TinyTokenizer()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [tokenizer.token_id(EOS_TOKEN), tokenizer.token_id(PAD_TOKEN)]
    model.save_pretrained(directory)
    shutil.copyfile(tokenizer_file(), directory / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def token_logprobs(model: Qwen3ForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The logprob of each masked token, given those before it, at temperature 1.

    ``ids`` and ``mask`` are ``[rows, length]``, padded on the right; the answer is a vector of the
    masked tokens in row-major order, with gradient. The output layer runs for these alone.
    """
    if bool(mask[:, 0].any()):
        raise ValueError("the first token of a row has no logprob")
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    chosen = mask[:, 1:]
    logits = model.lm_head(hidden[:, :-1][chosen]).float()
    wanted = ids[:, 1:][chosen]
    return torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None])[:, 0]
