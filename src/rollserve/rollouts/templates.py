"""What is found of each policy's chat template, in the background, one at a time.

Until a policy's template has been probed its ``template`` is None. What can't be probed here (a hub name
that this machine can't reach, a probe that does not end) is stored as ``unknown`` with the reason, and
tried again when a backend is registered, and when groups are submitted, which are refused meanwhile.
"""

from __future__ import annotations

import asyncio
import logging

from rollserve.errors import InvalidInput, NotFound
from rollserve.records.policy import Policy, TemplateFinding, TemplateReport
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


def trouble_of(policy: Policy) -> str | None:
    """Why it can't be read; None where that is not known to be so."""
    if is_probed(policy) or policy.template is None:
        return None
    return policy.template.keep.detail or "its chat template could not be probed"


_VERDICTS = {
    "exact": "every kind of conversation that was tried goes on from its exact tokens",
    "exceptions": "most kinds of conversation go on from their exact tokens; not exact: {cases}",
    "inexact": "conversations do not go on from their exact tokens: {detail}",
    "unknown": "it could not be probed: {detail}",
}


def in_words(name: str, finding: TemplateFinding) -> str:
    """One line for whoever runs the server."""
    keep, strip = _said(finding.keep), _said(finding.strip)
    said = keep if keep == strip else f"runs that keep earlier thinking: {keep}; that strip it: {strip}"
    return f"chat template of policy {name!r}: {said} (docs/backends.md, Templates, says what this means)"


def _said(report: TemplateReport) -> str:
    return _VERDICTS[report.verdict].format(cases=", ".join(report.exceptions), detail=report.detail)


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

    async def check(self, name: str, field: str) -> Policy:
        """The policy. Raises ``InvalidInput`` for one of which the last probe failed: a rollout would fail as
        it did, after all its tries. It is probed again then. ``NotFound`` without the policy."""
        policy = await self._store.get_policy(name)
        trouble = trouble_of(policy)
        if trouble is None:
            return policy
        self.ask(name)
        raise InvalidInput(
            f"policy {name!r} can't be used: {trouble}",
            field=field,
            hint="mend what is wrong and try again in a few seconds: it is being looked at anew; a policy's "
            "settings do not change, so a wrong renderer wants another policy",
        )

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
        log.info("%s", in_words(name, finding))
        self._happened.ring()
