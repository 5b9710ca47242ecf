"""Who answers the calls of a session: the run's own policy, and those of its routes.

Each has a trajectory tree of its own: what one policy said is never the beginning of what another is asked.
Side calls that name no route stand in the own policy's tree, where they are told by what is there; a call
there that goes on from one that another policy answered is rendered whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rollserve.errors import UnknownName
from rollserve.gateway.lineage import Lineage
from rollserve.gateway.node import Match, Node
from rollserve.gateway.policies import PolicyState
from rollserve.gateway.rendering import Rendering
from rollserve.gateway.tokens import TextTokenizer
from rollserve.gateway.tree import Tree
from rollserve.records.call import ChatRequest
from rollserve.records.run import RunSpec

OWN = ""
"""The route of the run's own policy."""


@dataclass(frozen=True, slots=True)
class Served:
    """What answers a call: a policy, and its way between messages and ids. Without a ``rendering`` the
    engine renders, and reads what was said; without a ``tokenizer`` there are no ids. ``route`` is the name
    it is asked by."""

    policy: PolicyState
    rendering: Rendering | None = None
    tokenizer: TextTokenizer | None = None
    route: str = OWN


class Answerers:
    """Of one session. Where graders ask there is no own policy."""

    def __init__(self, run: RunSpec, served: Mapping[str, Served]) -> None:
        self._run = run
        self._served = dict(served)
        self._trees = {name: Tree() for name in (OWN, *served)}
        aside = (name for name, route in run.routes.items() if route.side_calls)
        self.side = next((served[name] for name in aside if name in served), None)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    @property
    def own(self) -> Served | None:
        return self._served.get(OWN)

    @property
    def routes(self) -> list[str]:
        return [name for name in self._served if name != OWN]

    def asked(self, route: str) -> Served:
        """Raises ``UnknownName``."""
        served = self._served.get(route)
        if served is None:
            raise UnknownName("model", route, self.routes, field="model", list_all=True)
        return served

    def tree(self, route: str = OWN) -> Tree:
        return self._trees[route]

    def find(self, call_id: str) -> Node | None:
        """Of any answerer."""
        return next((node for tree in self._trees.values() if (node := tree.get(call_id))), None)

    def place(self, tree: Tree, match: Match, lineage: Lineage, request: ChatRequest) -> tuple[Served, Match]:
        """Who answers, and where the call stands then."""
        by = self.asked(request.route)
        if request.route or self.side is None:
            return by, match
        aside = lineage.label == "side"
        if match.parent is not None and (match.parent.label == "side") != aside:
            match = replace(tree.reroot(match, "route"), broke=None)
        return self.side if aside else by, match

    def trained(self, by: Served) -> bool:
        """Whether what it samples may be trained."""
        return self._run.trains(by.route)

    def policy_name(self, by: Served) -> str:
        """Empty for the run's own policy, by whatever route it is asked."""
        name = by.policy.policy.spec.name
        return "" if name == self._run.policy else name
