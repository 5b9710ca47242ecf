"""A policy's template is probed once, in the background, and kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollserve.build.probes import probe_template
from rollserve.records.policy import BackendSpec, Policy, PolicySpec, RendererSpec, TemplateFinding
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.templates import Templates, is_probed
from rollserve.testing.fakes_server import FakeExecutor
from rollserve.testing.fakes_server import probe_template as fake_probe
from rollserve.testing.server_room import MakeRoom, Room

POLICY = PolicySpec(name="pol", model="m", tokenizer="tiny")
GONE = POLICY.model_copy(update={"name": "gone", "tokenizer": "gone"})


async def finding(room: Room, name: str) -> TemplateFinding:
    async def found() -> bool:
        return (await room.core.policies.get(name)).template is not None

    await room.until(found)
    template = (await room.core.policies.get(name)).template
    assert template is not None
    return template


async def test_what_was_found_stands_with_the_policy(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor()) as room:
        assert (await room.core.policies.create(POLICY)).template is None
        assert (await finding(room, "pol")).keep.verdict == "exact"
    async with make_room(FakeExecutor()) as room:
        assert (await room.core.policies.get("pol")).template is not None


async def test_one_that_was_not_probed_is_at_the_next_start(room: Room) -> None:
    await room.store.create_policy((await _policy(room)).model_copy(update={"spec": POLICY}))
    templates = Templates(room.core._ports, happened=Bell())
    running = asyncio.create_task(templates.run())
    await finding(room, "pol")
    running.cancel()


async def _policy(room: Room) -> Policy:
    return await room.core.policies.create(POLICY.model_copy(update={"name": "other"}))


async def test_what_could_not_be_had_is_tried_again_with_a_backend(room: Room) -> None:
    asked: list[str] = []

    async def probe(spec: PolicySpec) -> TemplateFinding:
        asked.append(spec.name)
        return await fake_probe(spec)

    await room.store.create_policy((await _policy(room)).model_copy(update={"spec": GONE}))
    templates = Templates(replace(room.core._ports, probe_template=probe), happened=Bell())
    running = asyncio.create_task(templates.run())
    await room.until(lambda: asked.count("gone") == 1)
    assert (await finding(room, "gone")).keep.verdict == "unknown"
    assert not is_probed(await room.core.policies.get("gone"))
    templates.ask("gone")
    await room.until(lambda: asked.count("gone") == 2)
    templates.ask("other")
    await asyncio.sleep(0.05)
    assert asked.count("other") <= 1  # it is known
    running.cancel()


async def test_a_new_backend_asks(room: Room) -> None:
    await room.core.policies.create(POLICY)
    await finding(room, "pol")
    asked: list[str] = []

    class Asked(Templates):
        def ask(self, name: str) -> None:
            asked.append(name)

    ports = room.core._ports
    policies = Policies(ports, Asked(ports, happened=Bell()), changed=Bell(), happened=Bell())
    await policies.register("pol", BackendSpec(url="http://b"))
    assert asked == ["pol"]


async def test_the_real_probe_runs_in_a_process_of_its_own() -> None:
    spec = POLICY.model_copy(update={"renderer": RendererSpec(options={"enable_thinking": False})})
    found = await probe_template(spec)
    assert found.keep.verdict == "exceptions"
    assert all("after_thinking" in each for each in found.keep.exceptions)


async def test_a_tokenizer_that_is_not_there_is_unknown_with_the_reason() -> None:
    found = await probe_template(POLICY.model_copy(update={"tokenizer": "/no/such/folder"}))
    assert found.strip.verdict == "unknown"
    assert "no such file or directory: /no/such/folder" in found.strip.detail
