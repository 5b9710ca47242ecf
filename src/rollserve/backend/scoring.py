"""Logprobs of a prompt's tokens, checked: one for each token but the first, of the tokens that were sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from rollserve.backend.http import Answer
from rollserve.backend.refusals import refusal
from rollserve.errors import BackendError, CannotScore, RollserveError

OPERATION = "backend.score"
SCORE_S = 300.0
"""For one prompt, its wait in the engine's queue included."""

ALMOST_NEVER = -9999.0
"""What stands for a probability of zero, as the servers write it: JSON has no infinity."""


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float


PromptLogprobs = list[Mapping[str, PromptLogprob] | None]
"""vLLM's: a mapping from ids (as text) to logprobs at each position, None at the first."""


def of_mappings(token_ids: Sequence[int], given: PromptLogprobs | None) -> list[float]:
    """Raises ``CannotScore`` when there is none, ``BackendError`` when it is not of these tokens."""
    if given is None:
        raise CannotScore("the answer has no prompt_logprobs", operation=OPERATION)
    if len(given) != len(token_ids):
        raise BackendError(
            f"{len(given)} prompt logprobs of {len(token_ids)} prompt tokens", operation=OPERATION
        )
    found = [
        None if at is None else at.get(str(token_id)) for token_id, at in zip(token_ids, given, strict=True)
    ]
    return scored(token_ids, token_ids, [None if one is None else one.logprob for one in found])


def scored(token_ids: Sequence[int], ids: Sequence[int], logprobs: Sequence[float | None]) -> list[float]:
    """``logprobs`` without the first. ``ids`` are those that the server says it scored."""
    if list(ids) != list(token_ids) or len(logprobs) != len(token_ids):
        message = f"the server scored {len(ids)} tokens, not the {len(token_ids)} that were sent"
        raise CannotScore(message, operation=OPERATION)
    values = [ALMOST_NEVER if value is not None and value == -math.inf else value for value in logprobs[1:]]
    if any(value is None or not math.isfinite(value) for value in values):
        raise BackendError("a token of the prompt came without its logprob", operation=OPERATION)
    return [value for value in values if value is not None]


def refuse_scoring(answer: Answer) -> RollserveError:
    """An HTTP answer that is no score. That it does not know the parameter is no failure of the server."""
    error = refusal(answer, operation=OPERATION)
    if type(error) is BackendError and answer.status in (400, 403, 404, 405, 422, 501):
        return CannotScore(error.message, operation=OPERATION)
    return error
