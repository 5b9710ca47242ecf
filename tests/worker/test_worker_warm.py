"""Sandboxes made ahead: the target follows the demand, and nothing of them outlives the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.errors import SandboxError
from rollserve.rollouts.warm import TRIM_EVERY_S, WINDOW_S, WarmRuntime
from rollserve.sandbox.base import Sandbox, SandboxLimits, SandboxSpec
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.testing.clock import FakeClock
from rollserve.testing.fakes_sandbox import FakeRuntime
from rollserve.testing.journal import Hooks, Journal

PLAIN = SandboxSpec()
OTHER = SandboxSpec(limits=SandboxLimits(memory_mb=64))


class Bench:
    def __init__(self, most: int = 8) -> None:
        self.hooks = Hooks()
        self.journal = Journal()
        self.inner = FakeRuntime(self.hooks, self.journal)
        self.clock = FakeClock()
        self.warm = WarmRuntime(self.inner, most=most, clock=self.clock)

    async def ask(self, spec: SandboxSpec = PLAIN, times: int = 1) -> list[Sandbox]:
        made = [await self.warm.create(spec, owner="a", ttl_s=60) for _ in range(times)]
        await self.clock.settle()
        return made


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.warm.close()
    assert bench.inner.open == set()
    assert bench.clock.timers == 0


async def test_the_first_is_cold_and_the_next_is_warm(bench: Bench) -> None:
    (first,) = await bench.ask()
    assert first.id == "a-1"
    assert bench.warm.spares == 1
    spec = SandboxSpec(files={"f": b"1"}, env={"A": "b"})
    (second,) = await bench.ask(spec)
    assert second.id == "spare-1"
    assert await second.read_file("f") == b"1"
    assert bench.warm.counters() == {"warm_starts": 1, "cold_starts": 1, "spares_made": 3}


async def test_specs_that_differ_in_more_than_files_and_environment_share_nothing(bench: Bench) -> None:
    await bench.ask(PLAIN)
    (other,) = await bench.ask(OTHER)
    assert other.id.startswith("a-")


async def test_what_is_bound_to_an_attempt_is_not_made_ahead(bench: Bench) -> None:
    await bench.ask(SandboxSpec(sockets={"/tmp/s": "/tmp/s"}), times=3)
    assert bench.warm.spares == 0


async def test_a_snapshot_is_not_made_ahead_of(bench: Bench) -> None:
    (first,) = await bench.ask()
    spares = bench.warm.spares
    await bench.ask(SandboxSpec(snapshot=await first.snapshot()), times=2)
    assert bench.warm.spares == spares
    assert bench.warm.counters()["cold_starts"] == 3


async def test_the_target_is_the_largest_burst_of_a_minute(bench: Bench) -> None:
    await bench.ask(times=5)
    assert bench.warm.spares == 5
    await bench.clock.advance(WINDOW_S / 2)
    await bench.ask(times=1)
    assert bench.warm.spares == 5
    await bench.clock.advance(WINDOW_S / 2 + TRIM_EVERY_S)
    assert bench.warm.spares == 1
    await bench.clock.advance(WINDOW_S + TRIM_EVERY_S)
    assert bench.warm.spares == 0
    assert bench.clock.timers == 0


async def test_no_more_than_the_most_and_the_last_asked_for_first(bench: Bench) -> None:
    await bench.ask(PLAIN, times=7)
    await bench.ask(OTHER, times=6)
    await bench.clock.advance(TRIM_EVERY_S)
    assert bench.warm.spares == 8
    kinds = [spare.spec.limits for spare in bench.inner.made if spare.owner == "spare" and not spare.closed]
    assert kinds.count(OTHER.limits) == 6


async def test_nobody_waits_for_a_spare_to_be_made(bench: Bench) -> None:
    """One at a time, and none while a start of an attempt's own goes on."""
    gate = asyncio.Event()
    bench.hooks.create = gate.wait
    asked = [asyncio.create_task(bench.warm.create(PLAIN, owner="a", ttl_s=60)) for _ in range(3)]
    await bench.clock.settle()
    assert bench.warm.counters()["spares_made"] == 0
    gate.set()
    await asyncio.gather(*asked)
    await bench.clock.settle()
    assert [sandbox.owner for sandbox in bench.inner.made] == ["a"] * 3 + ["spare"] * 3


async def test_a_spare_that_died_is_passed_over(bench: Bench) -> None:
    await bench.ask(times=2)
    spares = [sandbox for sandbox in bench.inner.made if sandbox.owner == "spare"]
    await spares[0].close()
    (taken,) = await bench.ask()
    assert taken is spares[1]
    for spare in bench.inner.made:
        await spare.close()
    (taken,) = await bench.ask()
    assert taken.id.startswith("a-")


async def test_spares_that_can_not_be_made_are_tried_again_later(bench: Bench) -> None:
    async def broken() -> None:
        raise SandboxError("no room", operation="sandbox.start")

    await bench.ask()
    bench.hooks.create = broken
    await bench.ask()
    assert bench.warm.spares == 0
    with pytest.raises(SandboxError, match="no room"):
        await bench.ask()

    async def works() -> None:
        bench.journal("tried")

    bench.hooks.create = works
    await bench.clock.advance(1)
    assert "tried" not in bench.journal.entries
    await bench.clock.advance(3 * TRIM_EVERY_S)
    assert bench.warm.spares > 0


async def test_closing_cancels_what_is_being_made() -> None:
    bench = Bench()
    await bench.ask()
    bench.hooks.create = asyncio.Event().wait
    await bench.ask()
    await bench.warm.close()
    assert bench.inner.made[-1].closed


async def test_none_are_made_where_none_are_wanted() -> None:
    bench = Bench(most=0)
    await bench.ask(times=3)
    assert bench.warm.counters()["spares_made"] == 0
    await bench.warm.close()


@pytest.mark.userns
async def test_a_warm_bubblewrap_sandbox_is_as_a_cold_one(tmp_path: Path) -> None:
    inner = BubblewrapRuntime(data_dir=tmp_path)
    if not inner.report().usable:
        pytest.skip(inner.report().detail)
    warm = WarmRuntime(inner, most=2, clock=Bench().clock)
    files = {f"dir/f{number}": b"\0\xff" for number in range(6)}
    spec = SandboxSpec(files=files, env={"TOKEN": "it's $x", "UID": "7", "LINES": "a\nb"})
    look = 'pwd; cat dir/f5 | od -c | head -1; printf "%s|%s\\n" "$TOKEN" "$LINES"; env | grep -c TOKEN'
    outputs = []
    for _ in range(2):
        box = await warm.create(spec, owner="a", ttl_s=60)
        outputs.append((await box.exec(look)).output)
        await box.exec("exit 3")
        outputs.append((await box.exec(look)).output)
        async with asyncio.timeout(20):
            while warm.spares == 0:
                await asyncio.sleep(0.01)
    assert warm.counters()["warm_starts"] == 1
    assert len(set(outputs)) == 1, outputs
    await warm.close()
