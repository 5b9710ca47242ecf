"""Routes: other policies beside the run's own, asked by a name as the model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollserve.errors import InvalidInput, UnknownName
from rollserve.gateway.base import SessionSpec
from rollserve.gateway.sessions import GatewaySession
from rollserve.records.call import ChatRequest, Message
from rollserve.records.policy import BackendInfo
from rollserve.records.run import RouteSpec, RunSpec
from rollserve.records.task import Limits

from .conftest import SHELL, MemorySegment, World, eventually
from .serving import of_session, serving

USER = Message(role="user", content="hi")
ROUTES: dict[str, Any] = {
    "judge": "other",
    "user": {"policy": "other", "sampling": {"temperature": 0.0, "max_tokens": 7}},
}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def session(world: World) -> GatewaySession:
    world.view_of("other", model="small")
    return await world.open(run={"routes": ROUTES})


async def grading(world: World, **routes: Any) -> GatewaySession:
    segment = MemorySegment()
    world.segments.append(segment)
    return await world.service.open_session(
        SessionSpec(
            attempt_id="a1",
            rollout_id="r1",
            run=RunSpec(policy="p", routes=routes),
            limits=Limits(),
            segment=segment,
            clock=world.clock,
            stage="grade",
        )
    )


async def test_a_route_has_its_policy_its_sampling_and_its_own_roots(
    world: World, session: GatewaySession
) -> None:
    first = await session.model.chat([USER])
    judged = await session.model.chat([USER, first.message, USER], model="judge")
    await session.model.chat([USER, first.message, USER, judged.message, USER], model="judge")
    await session.model.chat([USER], model="user")
    await session.model.chat([USER, first.message, USER], model="tiny")
    calls = world.segments[0].calls
    assert [call.route for call in calls] == ["", "judge", "judge", "user", ""]
    assert [call.policy for call in calls] == ["", "other", "other", "other", ""]
    assert [request.model for request in world.pool.requests] == ["tiny", "small", "small", "small", "tiny"]
    assert [call.parent for call in calls] == [None, None, calls[1].id, None, calls[0].id]
    assert all(call.broke is None and not call.drift for call in calls)
    assert [call.label for call in calls] == ["continuation"] * 5
    sampling = [(call.sampling.temperature, call.sampling.max_tokens) for call in calls[2:4]]
    assert sampling == [(1.0, 4096), (0.0, 7)]
    assert session.counts["turns"] == 5
    assert session.counts["sampled_tokens"] == sum(len(call.sampled_ids) // 4 for call in calls)


async def test_the_conversation_is_the_own_policys(session: GatewaySession) -> None:
    first = await session.model.chat([USER])
    await session.model.chat([USER, first.message, Message(role="user", content="good?")], model="judge")
    assert session.conversation() == [USER, first.message]


async def test_code_for_the_run_hears_of_a_wrong_name(session: GatewaySession) -> None:
    with pytest.raises(UnknownName, match="did you mean 'judge'") as caught:
        await session.model.chat([USER], model="juge")
    assert caught.value.field == "model"
    assert session.counts["turns"] == 0


async def test_only_the_policy_that_is_paused_holds_its_calls(world: World, session: GatewaySession) -> None:
    world.view(paused=True)
    await session.model.chat([USER], model="judge")
    held = asyncio.create_task(session.model.chat([USER]))
    await eventually(lambda: session.conversation_state.waiting == 1)
    world.view()
    await held
    world.view_of("other", model="small", paused=True)
    await session.model.chat([USER])
    judging = asyncio.create_task(session.model.chat([USER], model="judge"))
    await eventually(lambda: session.conversation_state.waiting == 1)
    world.view_of("other", model="small")
    await judging


async def test_what_is_not_trained_need_not_be_exact(world: World) -> None:
    world.view_of("other", model="small")
    world.pool.info = BackendInfo(engine="scripted", models=["small"], logprobs_mode="raw")
    routes = {"judge": "other", "pupil": {"policy": "other", "train": True}}
    session = await world.open(run={"routes": routes, "sampling": {"temperature": 0.5}, "rewrites": "fail"})
    said = await session.model.chat([USER], model="judge")
    changed = Message(role="assistant", content=f" {said.message.content}")
    await session.model.chat([USER, changed, USER], model="judge")
    assert all(call.inexact for call in world.segments[0].calls)
    assert (session.counts["inexact"], session.counts["rewritten"]) == (0, 0)
    await session.model.chat([USER], model="pupil")
    assert session.counts["inexact"] == 1


async def test_graders_have_only_the_routes_for_them(world: World) -> None:
    world.view_of("other", model="small")
    judge = RouteSpec(policy="other", stages=("grade",))
    session = await grading(world, judge=judge, user=RouteSpec(policy="other"))
    assert session.model_names == ["judge"]
    await session.model.chat([USER], model="judge")
    with pytest.raises(InvalidInput, match="name the route"):
        await session.model.chat([USER])
    with pytest.raises(UnknownName):
        await session.model.chat([USER], model="user")
    with pytest.raises(UnknownName):
        await session.call(ChatRequest(messages=(USER,)))
    agents = await world.open(run={"routes": {"judge": judge}})
    assert agents.model_names == ["tiny"]
    with pytest.raises(UnknownName):
        await agents.model.chat([USER], model="judge")
    await session.close()
    assert world.pool.released == [session.id]


ASK: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", {"model": "judge", "messages": HI}),
    ("/responses", {"model": "judge", "input": "hi"}),
    ("/messages", {"model": "judge", "max_tokens": 9, "messages": HI}),
    ("beta/models/judge:generateContent", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
]


@pytest.mark.parametrize(("path", "body"), ASK, ids=[path for path, _ in ASK])
async def test_every_dialect_asks_by_the_name(
    world: World, session: GatewaySession, path: str, body: dict[str, Any]
) -> None:
    async with serving(world), of_session(session) as http:
        answer = await http.post(f"{session.base_url}{path}", json=body)
        assert answer.status_code == 200, answer.text
    (call,) = world.segments[0].calls
    assert (call.route, call.policy) == ("judge", "other")


async def test_programs_see_the_names_and_any_other_is_the_own_models(
    world: World, session: GatewaySession
) -> None:
    async with serving(world), of_session(session) as http:
        listed = (await http.get("/models")).json()["data"]
        assert [each["id"] for each in listed] == ["tiny", "judge", "user"]
        answer = await http.post("/chat/completions", json={"model": "gpt-4o", "messages": HI})
        assert (answer.status_code, answer.json()["model"]) == (200, "gpt-4o")
        judged = await http.post("/chat/completions", json={"model": "judge", "messages": HI})
        assert judged.json()["model"] == "judge"
    assert [call.route for call in world.segments[0].calls] == ["", "judge"]


async def test_a_stored_answer_is_gone_on_from_by_another_model(
    world: World, session: GatewaySession
) -> None:
    async with serving(world), of_session(session) as http:
        first = (await http.post("/responses", json={"model": "m", "input": "hi"})).json()
        more = {"model": "judge", "input": "good?", "previous_response_id": first["id"]}
        answer = await http.post("/responses", json=more)
        assert answer.status_code == 200, answer.text
    one, two = world.segments[0].calls
    assert (two.route, two.parent) == ("judge", None)
    assert [message.content for message in two.messages] == ["hi", one.reply.content, "good?"]


async def test_side_calls_that_name_a_route_are_the_routes(world: World) -> None:
    world.view_of("other", model="small")
    routes = {"small": {"policy": "other", "side_calls": True}}
    session = await world.open(run={"routes": routes})
    await session.model.chat([USER], tools=[SHELL])
    system = Message(role="system", content="Write a title.")
    title = await session.model.chat([system, USER])
    await session.model.chat([system, USER, title.message, USER], model="small")
    calls = world.segments[0].calls
    assert [(call.route, call.label) for call in calls[1:]] == [("small", "side"), ("small", "continuation")]
    assert calls[2].parent is None
