"""What a session has made so far, and by which rules: ``planning`` reads it, ``recording`` writes it."""

from __future__ import annotations

from rollserve.gateway.answerers import Answerers
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.images import SessionImages
from rollserve.gateway.node import Node
from rollserve.records.ids import Ids

Context = tuple[Ids, Ids, Ids]
"""All ids up to a call's sampled ones, those, and the call's own prompt ids."""

_KEPT_CONTEXTS = 4
_COUNTS = ("turns", "sampled_tokens", "prompt_tokens", "breaks", "inexact", "rewritten")


class SessionState:
    """``newest`` is of the run's own policy. ``told_tokens`` were sampled without ids: as many as the engine
    says."""

    def __init__(self, spec: SessionSpec, answerers: Answerers, images: SessionImages) -> None:
        self.spec = spec
        self.answerers = answerers
        self.images = images
        self.newest: Node | None = None
        self.call_ids: list[str] = []
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.told_tokens = 0
        self._contexts: dict[str, Context] = {}

    @property
    def sampled_tokens(self) -> int:
        """Of the budget that are used."""
        return self.counts["sampled_tokens"] + self.told_tokens

    def context(self, node: Node) -> Context:
        """Those of the newest calls are kept, others made of the tree."""
        known = self._contexts.get(node.call_id)
        if known is None:
            path = node.path()
            packed = b"".join(data for each in path[:-1] for data in (each.prompt_ids, each.sampled_ids))
            before = Ids(packed=packed + node.prompt_ids)
            known = (before, Ids(packed=node.sampled_ids), Ids(packed=node.prompt_ids))
            self.keep(node.call_id, known)
        return known

    def keep(self, call_id: str, context: Context) -> None:
        self._contexts[call_id] = context
        if len(self._contexts) > _KEPT_CONTEXTS:
            del self._contexts[next(iter(self._contexts))]
