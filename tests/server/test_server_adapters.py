"""Updates of policies that are adapters of one server: each its own, and by the server's own routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from msgspec import structs

from rollserve.backend.engine_control import make_control
from rollserve.backend.registry import make_backend
from rollserve.errors import BackendUnavailable, InvalidInput
from rollserve.executor.base import WorkerStats
from rollserve.records.policy import Backend, BackendKind, BackendSpec, BackendState, PolicySpec
from rollserve.records.update import UpdateMode, UpdateState, WeightUpdate
from rollserve.testing.fakes_server import FakeExecutor
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_adapters import SglangAdapters, allow_adapters
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.testing.scripted_sglang import SglangApp
from rollserve.testing.server_room import MakeRoom, Room

STATS = WorkerStats(at=0.0, stages={}, counters={}, loop_lag_ms_p99=0.0, rss_mb=1.0, cpu_s=0.0)


@dataclass
class Bench:
    room: Room
    engine: ScriptedEngine
    kind: BackendKind
    url: str

    async def policy(self, name: str, model: str) -> None:
        """Registered with what a real probe finds."""
        core = self.room.core
        await core.policies.create(PolicySpec(name=name, model=model, tokenizer="tiny"))
        spec = BackendSpec(url=self.url, kind=self.kind, options={"adapter_path": f"/{model}/0"})
        client = make_backend(spec, model)
        info = await client.probe()
        await client.close()
        backend = await core.policies.register(name, spec)
        await self.room.store.put_backend(backend.model_copy(update={"info": info}))

    async def begin(self, name: str, mode: UpdateMode) -> WeightUpdate:
        updates = self.room.core.updates
        update = await updates.begin(name, mode, 60.0)
        facts = {(await self.backend(name)).id: {"held": update.id, "in_flight": 0}}
        self.room.executor.say("w1", structs.replace(STATS, backends=facts))

        async def ready() -> bool:
            return (await updates.get(name, update.id)).state is UpdateState.READY

        await self.room.until(ready)
        return update

    async def backend(self, name: str) -> Backend:
        (found,) = await self.room.core.policies.registered(name)
        return found

    def held(self) -> set[str]:
        """Policies whose calls the workers hold."""
        newest = {view.policy().spec.name: view.policy().update for view in self.room.executor.views}
        return {name for name, update in newest.items() if update is not None and update.open}


def served(engine: ScriptedEngine, kind: BackendKind) -> ScriptedApp:
    """A server of that kind that loads adapters."""
    if kind is BackendKind.SGLANG:
        app = SglangApp(engine)
        SglangAdapters(app)
        return app
    whole = ScriptedApp(engine)
    allow_adapters(whole)
    return whole


@pytest.fixture(params=[BackendKind.VLLM, BackendKind.SGLANG])
async def bench(make_room: MakeRoom, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    engine = ScriptedEngine(label="base")
    app = served(engine, request.param)
    async with (
        serving(app) as url,
        make_room(FakeExecutor(), open_backend=make_backend, controls=make_control) as room,
    ):
        made = Bench(room, engine, request.param, url)
        await made.policy("one", "lora-one")
        await made.policy("two", "lora-two")
        yield made


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_one_adapter_is_updated_and_the_other_left_alone(bench: Bench, mode: UpdateMode) -> None:
    assert bench.engine.adapters == {"lora-one": "/lora-one/0", "lora-two": "/lora-two/0"}
    update = await bench.begin("one", mode)
    assert bench.engine.paused is None
    assert bench.held() == {"one"}
    salts = {name: (await bench.room.core.policies.get(name)).cache_salt for name in ("one", "two")}
    policy = await bench.room.core.updates.commit("one", update.id, 1, None, None, "/lora-one/1")
    assert (policy.version, policy.update and policy.update.state) == (1, UpdateState.COMMITTED)
    assert bench.engine.adapters == {"lora-one": "/lora-one/1", "lora-two": "/lora-two/0"}
    assert bench.engine.label == "base"
    assert bench.held() == set()
    assert policy.cache_salt != salts["one"]
    assert (await bench.room.core.policies.get("two")).cache_salt == salts["two"]
    assert policy.canary is not None
    assert policy.canary.verdict == "unverified"  # a vLLM is not scored then, and one is compared with none


async def test_the_trainer_may_load_it_its_own_way(bench: Bench) -> None:
    update = await bench.begin("one", UpdateMode.DRAIN)
    policy = await bench.room.core.updates.commit("one", update.id, 1, None, None)
    assert policy.version == 1
    assert bench.engine.adapters["lora-one"] == "/lora-one/0"


async def test_a_backend_that_can_not_load_it_fails_the_commit(bench: Bench) -> None:
    update = await bench.begin("one", UpdateMode.DRAIN)
    with pytest.raises(BackendUnavailable, match=r"No adapter found|No such file"):
        await bench.room.core.updates.commit("one", update.id, 1, None, None, "/missing")
    assert (await bench.room.core.policies.get("one")).version == 0
    policy = await bench.room.core.updates.commit("one", update.id, 1, None, None, "/lora-one/1")
    assert policy.version == 1
    assert (await bench.backend("one")).state is BackendState.ACTIVE


async def test_a_whole_model_takes_no_adapter(bench: Bench) -> None:
    await bench.room.core.policies.create(PolicySpec(name="base", model="scripted", tokenizer="tiny"))
    await bench.room.core.policies.register("base", BackendSpec(url=bench.url, kind=bench.kind))
    update = await bench.begin("base", UpdateMode.DRAIN)
    with pytest.raises(InvalidInput, match="whole model") as caught:
        await bench.room.core.updates.commit("base", update.id, 1, None, None, "/a")
    assert caught.value.field == "adapter_path"


async def test_figures_prove_the_adapter_where_the_server_scores_it(bench: Bench) -> None:
    update = await bench.begin("one", UpdateMode.DRAIN)
    figures = bench.engine.score(update.canary_ids)
    policy = await bench.room.core.updates.commit("one", update.id, 1, None, figures, "/lora-one/1")
    assert policy.canary is not None
    assert policy.canary.verdict == ("verified" if bench.kind is BackendKind.SGLANG else "unverified")
