from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from pydantic import SecretStr

from rollserve.config import ApiSettings, Settings
from rollserve.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    QueueFull,
    Unavailable,
    UnknownName,
    VersionRegression,
)
from rollserve.executor.base import BackendReport
from rollserve.records.policy import BackendSpec, BackendState, PolicySpec
from rollserve.records.rollout import RolloutState
from rollserve.records.run import Quota, RunSpec
from rollserve.rollouts.conversation import conversation
from rollserve.store.ops.tx import Tx
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fakes_server import FakeExecutor, a_call, completes, ended
from rollserve.testing.server_room import MakeRoom, Room, a_task
from rollserve.wire import GroupBody

POLICY = PolicySpec(name="pol", model="m", tokenizer="tiny")


# -- policies


async def test_each_change_of_a_policy_reaches_the_workers_in_order(room: Room) -> None:
    await room.core.policies.create(POLICY)
    await room.core.policies.register("pol", BackendSpec(url="http://b", api_key=SecretStr("sesame")))
    await room.core.policies.set_version("pol", 1, "step-1")
    await room.core.policies.set_paused("pol", True)
    views = room.executor.views
    assert [view.revision for view in views] == sorted({view.revision for view in views})
    last = views[-1]
    assert (last.policy().version, last.policy().paused, last.policy().labels["step-1"]) == (1, True, 1)
    key = last.backends()[0].spec.api_key
    assert key is not None
    assert key.get_secret_value() == "sesame"


async def test_revisions_grow_over_a_restart(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor()) as room:
        await room.core.policies.create(POLICY)
        before = room.executor.views[-1].revision
    await asyncio.sleep(0.01)
    async with make_room(FakeExecutor()) as room:
        assert room.executor.views[0].revision > before


async def test_the_same_policy_again_is_no_conflict_another_one_is(room: Room) -> None:
    await room.core.policies.create(POLICY)
    await room.core.policies.create(POLICY)
    with pytest.raises(Conflict) as caught:
        await room.core.policies.create(POLICY.model_copy(update={"model": "other"}))
    assert f"there model is {POLICY.model!r}, not 'other'" in str(caught.value.hint)
    assert "tokenizer" not in str(caught.value.hint)


async def test_a_version_never_goes_back(room: Room) -> None:
    await room.core.policies.create(POLICY)
    await room.core.policies.set_version("pol", 3, None)
    await room.core.policies.set_version("pol", 3, None)
    with pytest.raises(VersionRegression):
        await room.core.policies.set_version("pol", 2, None)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://b/other", "'another-model'"),
        ("http://b/nothing", "nginx"),
        ("ftp://b", "http"),
    ],
)
async def test_a_url_that_is_no_backend_of_the_policy_is_refused(room: Room, url: str, says: str) -> None:
    await room.core.policies.create(POLICY)
    with pytest.raises(InvalidInput, match=says) as caught:
        await room.core.policies.register("pol", BackendSpec(url=url))
    assert caught.value.field == "url"
    assert (await room.core.policies.backends("pol")).items == []


async def test_one_server_is_one_backend_however_its_url_is_written(room: Room) -> None:
    policies = room.core.policies
    await policies.create(POLICY)
    first = await policies.register("pol", BackendSpec(url="http://b/v1"))
    assert first.spec.url == "http://b"
    for url in ("http://b", "http://b/", "HTTP://B:80/v1/v1", "http://b//", "http://b/v1//", "http://b/./v1"):
        assert (await policies.register("pol", BackendSpec(url=url))).id == first.id
    assert len((await policies.backends("pol")).items) == 1


async def test_what_is_no_base_url_is_refused_and_a_password_is_not_told(room: Room) -> None:
    await room.core.policies.create(POLICY)
    cases = (
        ("http://me:hunter2@b", "api_key"),
        ("http://b?x=1", "'http://b'"),
        ("http://b/v1#x", "'http://b'"),
    )
    for url, hint in cases:
        with pytest.raises(InvalidInput) as caught:
            await room.core.policies.register("pol", BackendSpec(url=url))
        assert caught.value.field == "url"
        assert hint in (caught.value.hint or "")
        assert "hunter2" not in str(caught.value)
    assert (await room.core.policies.backends("pol")).items == []


async def test_a_server_that_was_kept_twice_is_one_after_its_next_registration(room: Room) -> None:
    policies = room.core.policies
    await policies.create(POLICY)
    first = await policies.register("pol", BackendSpec(url="http://b"))
    again = first.model_copy(update={"id": "be_again", "spec": BackendSpec(url="http://b/v1/v1")})
    await room.store.put_backend(again)
    assert (await policies.register("pol", BackendSpec(url="http://b/"))).id == first.id
    assert [backend.id for backend in (await policies.backends("pol")).items] == [first.id]


async def test_an_address_without_a_scheme_is_completed_in_the_hint(room: Room) -> None:
    await room.core.policies.create(POLICY)
    with pytest.raises(InvalidInput) as caught:
        await room.core.policies.register("pol", BackendSpec(url="127.0.0.1:8000"))
    assert caught.value.hint == "did you mean 'http://127.0.0.1:8000'?"


async def test_a_backend_is_registered_once_drained_checked_and_removed(room: Room) -> None:
    policies = room.core.policies
    await policies.create(POLICY)
    backend = await policies.register("pol", BackendSpec(url="http://b"))
    assert (await policies.register("pol", BackendSpec(url="http://b"))).id == backend.id
    assert (await policies.check("pol", backend.id)).ok
    assert (await policies.drain("pol", backend.id)).state is BackendState.DRAINING
    with pytest.raises(NotFound):
        await policies.backend("other", backend.id)
    await policies.remove("pol", backend.id)
    assert room.executor.views[-1].backends() == []


async def test_workers_reports_mark_a_backend(room: Room) -> None:
    policies = room.core.policies
    await policies.create(POLICY)
    backend = await policies.register("pol", BackendSpec(url="http://b"))

    async def state(wanted: BackendState) -> bool:
        return (await policies.backend("pol", backend.id)).state is wanted

    room.executor.say("w1", BackendReport(backend_id=backend.id, ok=False, detail="refused"))
    await room.until(lambda: state(BackendState.FAILED))
    assert (await policies.backend("pol", backend.id)).error == "refused"
    room.executor.say("w1", BackendReport(backend_id="be_gone", ok=False))
    room.executor.say("w1", BackendReport(backend_id=backend.id, ok=True))
    await room.until(lambda: state(BackendState.ACTIVE))


# -- runs


async def test_a_run_needs_its_policy_and_finite_rewards(room: Room) -> None:
    await room.core.policies.create(POLICY)
    with pytest.raises(UnknownName, match="did you mean 'pol'") as caught:
        await room.core.runs.open(RunSpec(policy="poll"))
    assert caught.value.field == "policy"
    with pytest.raises(InvalidInput) as reward:
        await room.core.runs.open(RunSpec(policy="pol", failure_rewards={"agent": float("nan")}))
    assert reward.value.field == "failure_rewards.agent"


async def test_opening_with_a_key_opens_once(room: Room) -> None:
    await room.core.policies.create(POLICY)
    spec = RunSpec(policy="pol", name="a")
    runs = await asyncio.gather(*(room.core.runs.open(spec, "key") for _ in range(10)))
    assert len({run.id for run in runs}) == 1
    with pytest.raises(Conflict):
        await room.core.runs.open(RunSpec(policy="pol", name="b"), "key")
    with pytest.raises(InvalidInput):
        await room.core.runs.open(spec, "k" * 201)


async def test_a_closed_run_takes_no_groups_and_can_be_pruned(room: Room) -> None:
    run = await room.run()
    [group] = await room.submit(run)
    await room.started(1)
    await room.core.runs.close(run.id)
    with pytest.raises(Conflict):
        await room.submit(run)
    with pytest.raises(Conflict):
        await room.core.runs.prune(run.id)
    start = room.executor.history[0]
    ref = room.payloads.keep("p", AttemptPayload())
    room.executor.end(start.attempt_id, ended(start, payload=ref))
    await room.ended(group, RolloutState.COMPLETED)
    assert await room.core.runs.prune(run.id) == 1
    assert room.payloads.kept == {}
    with pytest.raises(NotFound):
        await room.core.runs.counts(run.id)


# -- groups


async def test_a_bad_task_is_named_and_nothing_is_stored(room: Room) -> None:
    run = await room.run()
    groups = [GroupBody(task=a_task()) for _ in range(3)]
    groups.append(GroupBody(task=a_task(agent={"name": "tol"})))
    with pytest.raises(UnknownName, match="did you mean 'tool'") as caught:
        await room.core.groups.submit(run.id, groups)
    assert caught.value.field == "groups.3.task.agent.name"
    assert (await room.core.runs.counts(run.id))["groups_open"] == 0


async def test_group_sizes_are_bounded(room: Room) -> None:
    run = await room.run()
    with pytest.raises(InvalidInput) as caught:
        await room.core.groups.submit(run.id, [GroupBody(task=a_task(), num_rollouts=100_000)])
    assert caught.value.field == "groups.0.num_rollouts"
    with pytest.raises(InvalidInput):
        await room.core.groups.submit(run.id, [])


async def test_a_full_queue_says_when_to_come_back(room: Room) -> None:
    run = await room.run(quota=Quota(max_queued_groups=2))
    await room.submit(run, groups=2)
    with pytest.raises(QueueFull) as caught:
        await room.submit(run)
    assert caught.value.retry_after_s


async def test_500_concurrent_submits_each_sent_twice_make_500_groups(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(capacity=64, play=completes())) as room:
        run = await room.run()
        keys = [f"k{index}" for index in range(500)]
        answers = await asyncio.gather(*(room.submit(run, key=key) for key in [*keys, *keys]))
        assert len({groups[0].id for groups in answers}) == 500

        async def met() -> bool:
            return (await room.core.runs.counts(run.id))["completed"] == 500

        await room.until(met, within_s=40)
        assert len(room.executor.history) == 500


# -- what a rollout did


async def test_a_trajectory_is_readable_while_it_runs_and_after(room: Room) -> None:
    run = await room.run()
    [group] = await room.submit(run)
    rollout = await room.rollout(group)
    assert (await room.core.trajectories.of_rollout(rollout.id)).live in (True, False)
    await room.started(1)
    start = room.executor.history[0]
    segment = room.payloads.open_segment(run.id, start.attempt_id)
    segment.append_call(a_call("c1"))
    live = await room.core.trajectories.of_rollout(rollout.id)
    assert (live.live, len(live.payload.calls)) == (True, 1)
    segment.append_call(a_call("c2", parent="c1"))
    segment.append_call(a_call("c3", parent="c1"))
    sealed = await segment.seal()
    room.executor.end(start.attempt_id, ended(start, payload=sealed.ref))
    await room.ended(group, RolloutState.COMPLETED)
    done = await room.core.trajectories.of_rollout(rollout.id)
    assert done.live is False
    texts = [message.content for message in conversation(done.payload.calls)]
    assert texts == ["question of c1", "answer of c1", "question of c3", "answer of c3"]
    with pytest.raises(NotFound):
        await room.core.trajectories.of_rollout(rollout.id, "att_other")
    made = await room.core.trajectories.samples(rollout.id)
    assert len(made.samples) == 2


# -- events


async def test_readers_with_different_cursors_see_the_same_events(room: Room) -> None:
    run = await room.run()
    await room.submit(run, groups=3)
    feed = room.core.events
    async with feed.reader():

        async def everything() -> bool:
            events, _ = await feed.read(0)
            return sum(event.type == "group.submitted" for event in events) == 3

        await room.until(everything)
        events, cursor = await feed.read(0)
        middle = events[2].seq
        later, _ = await feed.read(middle)
        assert [event.seq for event in later][: len(events) - 3] == [event.seq for event in events[3:]]
        other = await room.core.runs.open(run.spec)
        await room.submit(other)
        fresh = feed.listen()
        await room.until(lambda: _has(room, other.id, cursor))
        mine, after = await feed.read(cursor, other.id)
        assert {event.run_id for event in mine} == {other.id}
        assert after >= mine[-1].seq
        assert fresh is not None


async def _has(room: Room, run_id: str, after: int) -> bool:
    events, _ = await room.core.events.read(after, run_id)
    return any(event.type == "group.submitted" for event in events)


async def test_readers_are_woken_and_bounded(make_room: MakeRoom) -> None:
    settings = Settings(api=ApiSettings(max_event_streams=1))
    async with make_room(FakeExecutor(), settings=settings) as room:
        run = await room.run()
        feed = room.core.events
        async with feed.reader():
            with pytest.raises(QueueFull):
                async with feed.reader():
                    pytest.fail("there was no room")
            cursor = 0
            while True:
                fresh = feed.listen()
                events, following = await feed.read(cursor)
                if following == cursor:
                    break
                cursor = following
            await room.submit(run)
            async with asyncio.timeout(20):
                await fresh.wait()
            events, _ = await feed.read(cursor)
            assert events[0].seq == cursor + 1
        assert feed.readers == 0


# -- the whole


async def test_counters_only_grow_when_a_worker_is_lost(room: Room) -> None:
    await room.until(lambda: room.core.workers == 1)
    room.executor.stats("w1", {"calls": 5.0})
    room.executor.kill("w1")
    room.executor.stats("w2", {"calls": 2.0})

    async def met() -> bool:
        return (await room.core.status.snapshot()).counters.get("calls") == 7.0

    await room.until(met)
    assert (await room.core.status.snapshot()).counters["workers_lost"] == 1


async def test_not_ready_while_nothing_can_be_written(room: Room) -> None:
    def allow(pages: int) -> Callable[[Tx], object]:
        return lambda tx: tx.conn.exec_driver_sql(f"PRAGMA max_page_count = {pages}").scalar()

    await room.until(lambda: room.core.workers == 1)
    await room.core.check_ready()
    await room.store._write(allow(1))
    with pytest.raises(Unavailable, match="full"):
        for number in range(1000):
            await room.core.policies.create(PolicySpec(name=f"p{number}", model="m" * 1000, tokenizer="tiny"))
    with pytest.raises(Unavailable, match="the database can't be written"):
        await room.core.check_ready()
    await room.store._write(allow(1 << 20))
    await room.core.check_ready()


async def test_ready_means_that_rollouts_can_run(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(workers=0)) as room:
        with pytest.raises(Unavailable, match="no worker"):
            await room.core.check_ready()
        room.executor.join()
        await room.until(lambda: room.core.workers == 1)
        await room.core.check_ready()
        room.core.begin_stop()
        with pytest.raises(Unavailable, match="stopping"):
            await room.core.check_ready()
    assert room.executor.stopped
