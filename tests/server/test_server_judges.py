"""Judges of a re-grading are looked at together, each policy once, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from rollserve.errors import InvalidInput
from rollserve.records.policy import Backend, BackendInfo, BackendSpec, PolicySpec
from rollserve.records.regrade import JudgeRoute
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.routes import check_judges
from rollserve.rollouts.templates import Templates
from rollserve.testing.fakes_server import probe_backend
from rollserve.testing.server_room import Room

Probe = Callable[[BackendSpec, str], Awaitable[BackendInfo]]


class Engines:
    """Each address answers, but those that are ``away``; none before so many have been ``probed``."""

    def __init__(self, together: int = 1) -> None:
        self.away: set[str] = set()
        self.probed: list[str] = []
        self.stopped: list[str] = []
        self._together = together
        self._met = asyncio.Event()

    async def probe(self, spec: BackendSpec, model: str) -> BackendInfo:
        self.probed.append(spec.url)
        if len(self.probed) >= self._together:
            self._met.set()
        try:
            await self._met.wait()
            if spec.url in self.away:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.stopped.append(spec.url)
            raise
        return await probe_backend(spec, model)


class Late(Policies):
    """A backend is removed when it has been listed."""

    async def registered(self, name: str) -> list[Backend]:
        found = await super().registered(name)
        if found and found[0].spec.url == "http://leaving:1":
            await self._store.delete_backend(found[0].id)
        return found


def asking(room: Room, engines: Engines, kind: type[Policies] = Policies) -> Policies:
    ports = replace(room.core._ports, probe_backend=engines.probe)
    return kind(ports, Templates(ports, happened=Bell()), changed=Bell(), happened=Bell())


async def juries(room: Room, *names: str, backends: int = 1) -> None:
    for name in names:
        await room.core.policies.create(PolicySpec(name=name, model="j", tokenizer="tiny"))
        for at in range(1, backends + 1):
            await room.core.policies.register(name, BackendSpec(url=f"http://{name}:{at}"))


def routes(**policies: str) -> dict[str, JudgeRoute]:
    return {name: JudgeRoute(policy=policy) for name, policy in policies.items()}


async def test_each_policy_is_looked_at_once_and_all_together(room: Room) -> None:
    await juries(room, "jury", "critics")
    engines = Engines(together=2)  # one after the other, neither would be answered
    async with asyncio.timeout(20):
        await check_judges(routes(a="jury", b="critics", c="jury"), asking(room, engines))
    assert sorted(engines.probed) == ["http://critics:1", "http://jury:1"]


async def test_one_backend_that_answers_is_enough(room: Room) -> None:
    await juries(room, "jury", backends=3)
    engines = Engines(together=3)
    engines.away = {"http://jury:1", "http://jury:3"}
    async with asyncio.timeout(20):
        await check_judges(routes(a="jury"), asking(room, engines))
    assert set(engines.stopped) == engines.away


async def test_a_look_that_is_not_answered_ends_at_the_field(room: Room) -> None:
    await juries(room, "jury", "critics", backends=2)
    engines = Engines()
    engines.away = {"http://critics:1", "http://critics:2"}
    with pytest.raises(
        InvalidInput, match=r"no backend of policy 'critics' answered within 0\.2 s"
    ) as caught:
        async with asyncio.timeout(20):
            await check_judges(routes(a="jury", b="critics"), asking(room, engines), within_s=0.2)
    assert caught.value.field == "routes.b.policy"
    assert engines.away <= set(engines.stopped)


async def test_the_first_route_at_fault_is_named(room: Room) -> None:
    await juries(room, "jury", "critics")
    engines = Engines()
    engines.away = {"http://jury:1"}  # its refusal comes last
    with pytest.raises(InvalidInput) as caught:
        await check_judges(routes(a="jury", b="nobody"), asking(room, engines), within_s=0.2)
    assert caught.value.field == "routes.a.policy"


async def test_a_backend_that_is_removed_meanwhile_is_one_trouble_more(room: Room) -> None:
    await juries(room, "leaving")
    with pytest.raises(InvalidInput, match=r"no backend that could answer; .* has no backend 'be_") as caught:
        await check_judges(routes(a="leaving"), asking(room, Engines(), Late))
    assert caught.value.field == "routes.a.policy"
    await juries(room, "leaving", backends=2)
    await check_judges(routes(a="leaving"), asking(room, Engines(), Late))
