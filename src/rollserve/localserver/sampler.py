"""Logits → token, its logprob in the distribution it was drawn from, and its rank.

Each sequence draws from its own generator by inverse transform of one uniform number, so the same seed
gives the same answer in whatever company it is batched. Order of the filters as in vLLM: temperature,
``min_p``, ``top_k``, ``top_p``. Temperature 0 takes the most likely token and reports its logprob in the
distribution of temperature 1, unfiltered.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from rollserve.localserver.sequence import Sequence


def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[tuple[int, float, int]]:
    """``(token id, logprob, rank)`` of each row; ``logits`` is ``[rows, vocabulary]`` in float32.

    A model that gives NaN yields a NaN logprob: the caller must look.
    """
    params = [sequence.params for sequence in sequences]
    scaled = _forbid_stops(logits, sequences)
    if any(p.temperature not in (0.0, 1.0) for p in params):
        scaled = scaled / _column([p.temperature or 1.0 for p in params], scaled)
    scaled = _filtered(scaled, sequences)
    logprobs = torch.log_softmax(scaled, dim=-1)
    chosen = _draw(logprobs, sequences)
    picked = logprobs.gather(1, chosen)
    ranks = (logprobs > picked).sum(dim=-1) + 1
    return list(zip(chosen[:, 0].tolist(), picked[:, 0].tolist(), ranks.tolist(), strict=True))


def _column(values: Seq[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _forbid_stops(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Rows below their ``min_tokens`` can't sample a token that would end them."""
    held = [row for row, sequence in enumerate(sequences) if not sequence.may_stop]
    if held:
        logits = logits.clone()
    for row in held:
        logits[row, list(sequences[row].stop_ids)] = -torch.inf
    return logits


def _filtered(scaled: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    drawn = [sequence.params if sequence.params.temperature > 0 else None for sequence in sequences]
    vocab = scaled.shape[-1]
    min_p = [p.min_p if p else 0.0 for p in drawn]
    top_k = [min(p.top_k, vocab) if p and p.top_k > 0 else vocab for p in drawn]
    top_p = [p.top_p if p else 1.0 for p in drawn]
    if any(min_p):
        probs = torch.softmax(scaled, dim=-1)
        floor = probs.amax(dim=-1, keepdim=True) * _column(min_p, scaled)
        scaled = scaled.masked_fill(probs < floor, -torch.inf)
    if min(top_k) == vocab and min(top_p) == 1.0:
        return scaled
    ordered, places = scaled.sort(dim=-1, descending=True)
    beyond = torch.arange(vocab, device=scaled.device)[None, :] >= _column(top_k, scaled)
    ordered = ordered.masked_fill(beyond, -torch.inf)
    probs = torch.softmax(ordered, dim=-1)
    before = probs.cumsum(dim=-1) - probs
    limits = _column(top_p, scaled)
    ordered = ordered.masked_fill((before >= limits) & (limits < 1.0), -torch.inf)
    return torch.full_like(scaled, -torch.inf).scatter(1, places, ordered)


def _draw(logprobs: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """``[rows, 1]``: the chosen token of each row."""
    best = logprobs.argmax(dim=-1, keepdim=True)
    if all(sequence.params.temperature == 0 for sequence in sequences):
        return best
    greedy = torch.tensor([s.params.temperature == 0 for s in sequences], device=logprobs.device)[:, None]
    uniform = [s.rng.random() if s.params.temperature > 0 else 0.0 for s in sequences]
    # float64: with a large vocabulary the rounding of a float32 sum would reach the rarer tokens
    summed = logprobs.double().exp().cumsum(dim=-1)
    target = _column(uniform, summed) * summed[:, -1:]
    drawn = torch.searchsorted(summed, target, right=True)
    out_of_range = drawn >= logprobs.shape[-1]
    return torch.where(greedy | out_of_range, best, drawn)
