"""A policy's template is probed once, in the background, and kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollserve.build.probes import probe_template
from rollserve.errors import InvalidInput, NotFound
from rollserve.records.policy import (
    BackendSpec,
    Policy,
    PolicySpec,
    RendererSpec,
    TemplateFinding,
    TemplateReport,
)
from rollserve.records.run import RouteSpec, RunSpec
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.templates import Templates, in_words, is_probed
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


async def _ill(room: Room) -> None:
    """A policy whose tokenizer is gone, as its probe found."""
    await room.store.create_policy((await _policy(room)).model_copy(update={"spec": GONE}))
    report = TemplateReport(verdict="unknown", detail="no such folder")
    await room.store.set_policy_template("gone", TemplateFinding(keep=report, strip=report))


async def test_what_can_not_be_read_opens_no_run_and_takes_no_groups(room: Room) -> None:
    run = await room.run()
    await _ill(room)
    beside = {"judge": RouteSpec(policy="gone")}
    for spec in (RunSpec(policy="gone"), RunSpec(policy="pol", routes=beside)):
        with pytest.raises(InvalidInput, match=r"can't be used: (no such folder|it is gone)") as caught:
            await room.core.runs.open(spec)
        assert caught.value.field == ("routes.judge.policy" if spec.routes else "policy")
    await room.submit(run)
    report = TemplateReport(verdict="unknown", detail="it has gone")
    await finding(room, "pol")
    await room.store.set_policy_template("pol", TemplateFinding(keep=report, strip=report))
    with pytest.raises(InvalidInput, match="can't be used: it has gone") as refused:
        await room.submit(run)
    assert refused.value.field == "run.policy"


async def test_what_is_refused_is_looked_at_again(room: Room) -> None:
    run = await room.run()
    await finding(room, "pol")
    report = TemplateReport(verdict="unknown", detail="it was gone")
    await room.store.set_policy_template("pol", TemplateFinding(keep=report, strip=report))
    with pytest.raises(InvalidInput):
        await room.submit(run)

    async def mended() -> bool:
        return is_probed(await room.core.policies.get("pol"))

    await room.until(mended)
    await room.submit(run)


async def test_a_backend_is_not_registered_for_a_policy_that_can_not_be_read(room: Room) -> None:
    await _ill(room)
    asked: list[str] = []

    async def check(name: str) -> None:
        asked.append(name)
        raise InvalidInput(f"no such folder: {name}", field="tokenizer")

    ports = replace(room.core._ports, check_tokenizer=check)
    policies = Policies(ports, Templates(ports, happened=Bell()), changed=Bell(), happened=Bell())
    with pytest.raises(InvalidInput, match="no such folder: gone") as caught:
        await policies.register("gone", BackendSpec(url="http://b"))
    assert caught.value.field == "policy.tokenizer"
    await policies.register("other", BackendSpec(url="http://b"))
    assert asked == ["gone"]


async def test_a_tokenizer_that_can_not_be_loaded_makes_no_policy(room: Room) -> None:
    with pytest.raises(InvalidInput) as caught:
        await room.core.policies.create(POLICY.model_copy(update={"tokenizer": "/no/such"}))
    assert caught.value.field == "tokenizer"
    with pytest.raises(NotFound):
        await room.core.policies.get("pol")


async def test_the_real_probe_runs_in_a_process_of_its_own() -> None:
    spec = POLICY.model_copy(update={"renderer": RendererSpec(options={"enable_thinking": False})})
    found = await probe_template(spec)
    assert found.keep.verdict == "exceptions"
    assert all("after_thinking" in each for each in found.keep.exceptions)


async def test_a_tokenizer_that_is_not_there_is_unknown_with_the_reason() -> None:
    found = await probe_template(POLICY.model_copy(update={"tokenizer": "/no/such/folder"}))
    assert found.strip.verdict == "unknown"
    assert "no such file or directory: /no/such/folder" in found.strip.detail


def test_what_was_found_is_said_in_words() -> None:
    fine = TemplateReport(verdict="exact")
    some = TemplateReport(verdict="exceptions", exceptions=["user_turn:break", "tool_text:differ"])
    assert "every kind of conversation" in in_words("p", TemplateFinding(keep=fine, strip=fine))
    said = in_words("p", TemplateFinding(keep=fine, strip=some))
    assert "that strip it: most kinds" in said
    assert "not exact: user_turn:break, tool_text:differ" in said
    assert "docs/backends.md" in said
