"""How long a call waits for the backend that has its prefix, when that is full and another is not. Pure.

    nothing let go by ──a place elsewhere──▶ waits for home ──as long as its prefix is worth──▶ goes anywhere

* The time counts from the first free place elsewhere that the call lets go by in its turn, not while all are
  full: who leaves one line for another leaves for nothing. So it is in delay scheduling (M. Zaharia et al.,
  "Delay Scheduling", EuroSys 2010): who is next and has no local place lets others go by, for a bounded time,
  and keeps its turn.
* It is as long as it would cost to do without. Who waits no longer than what moving costs, and then moves,
  never pays more than twice what it would have paid had it known when its home gets free (ski rental: A.
  Karlin et al., "Competitive Snoopy Caching", Algorithmica 3, 1988).
* What it would cost: the cached tokens of the prompt are read anew elsewhere, and all who run there wait
  meanwhile. Routers weigh the same two, what is to be read against who runs: NVIDIA Dynamo's (blocks to
  prefill and to decode), llm-d's (scores of prefix and queue), SGLang's (the prefix, until loads are too far
  apart).
"""

from __future__ import annotations

from dataclasses import dataclass

from rollserve.backend.base import Generation

MOST_S = 30.0

_KEPT = 0.95
"""Of what earlier calls say of a pace, with each new one."""


@dataclass(slots=True)
class Pace:
    """What a sampled token costs a call on a backend, in seconds, whatever part of them its engine spends on
    the prompt. Sums that fade, so that calls count by their tokens."""

    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds = _KEPT * self.seconds + seconds
        self.tokens = _KEPT * self.tokens + tokens

    @property
    def token_s(self) -> float | None:
        return self.seconds / self.tokens if self.tokens else None


@dataclass(slots=True)
class Prefix:
    """What a backend has of a session in its cache: at most so many tokens, of weights with this salt."""

    tokens: int = 0
    salt: str = ""

    def add(self, tokens: int, salt: str) -> None:
        self.tokens = max(tokens, self.tokens) if salt == self.salt else tokens
        self.salt = salt

    def of(self, prompt_tokens: int | None, salt: str) -> int:
        """As far as the prompt goes; where that is not known (None), all there is."""
        if salt != self.salt:
            return 0
        return self.tokens if prompt_tokens is None else min(self.tokens, prompt_tokens)


def sampled(generation: Generation) -> int:
    """Tokens; a server without ids counts them itself."""
    counted = 0 if generation.usage is None else generation.usage.sampled_tokens
    return len(generation.token_ids) or counted


def read(generation: Generation) -> int:
    """Tokens of the prompt, as the backend says. 0 where it does not."""
    counted = 0 if generation.usage is None else generation.usage.prompt_tokens
    return len(generation.prompt_ids or ()) or counted


def worth_s(prefix_tokens: int, token_s: float | None, read_cost: float) -> float:
    """``token_s`` of where it would be read again, ``read_cost`` of reading a token in sampled ones."""
    return min(MOST_S, prefix_tokens * read_cost * (token_s or 0.0))


@dataclass(slots=True)
class Patience:
    """One call's. ``since`` it lets places elsewhere go by; None while there were none."""

    since: float | None = None

    def ends_at(self, worth_s: float, now: float) -> float:
        """A place elsewhere is free: at what time it is taken. Now, or in the past, when at once."""
        if self.since is None:
            self.since = now
        return self.since + worth_s
