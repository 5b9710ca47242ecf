"""What is found of each policy's chat template, in the background, one at a time.

Until a policy's template has been probed its ``template`` is None. What can't be probed here (a hub name
that this machine can't reach, a probe that does not end) is stored as ``unknown`` with the reason, and
tried again when a backend is registered.
"""

from __future__ import annotations

import asyncio
import logging

from rollserve.errors import NotFound
from rollserve.records.policy import Policy
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.pages import every
from rollserve.rollouts.patience import patiently
from rollserve.rollouts.ports import Ports

log = logging.getLogger(__name__)


def is_probed(policy: Policy) -> bool:
    """Or there is nothing to probe: the engine renders."""
    if policy.spec.interface != "tokens":
        return True
    return policy.template is not None and policy.template.keep.verdict != "unknown"


class Templates:
    """``run`` until cancelled; ``ask`` puts a policy in line (once, however often it is asked)."""

    def __init__(self, ports: Ports, *, happened: Bell) -> None:
        self._store = ports.store
        self._clock = ports.clock
        self._probe = ports.probe_template
        self._happened = happened
        self._wanted: dict[str, None] = {}
        self._some = asyncio.Event()

    def ask(self, name: str) -> None:
        self._wanted[name] = None
        self._some.set()

    async def run(self) -> None:
        for policy in await every(self._store.list_policies):
            if not is_probed(policy):
                self.ask(policy.spec.name)
        while True:
            await self._some.wait()
            self._some.clear()
            while self._wanted:
                name = next(iter(self._wanted))
                del self._wanted[name]
                await self._probe_one(name)

    async def _probe_one(self, name: str) -> None:
        try:
            policy = await patiently(self._clock, lambda: self._store.get_policy(name))
            if is_probed(policy):
                return
            finding = await self._probe(policy.spec)
            await patiently(self._clock, lambda: self._store.set_policy_template(name, finding))
        except NotFound:
            return
        verdicts = (finding.keep.verdict, finding.strip.verdict)
        log.info("template of policy %s: keep %s, strip %s", name, *verdicts)
        self._happened.ring()
