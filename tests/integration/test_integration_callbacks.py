"""``kill -9`` of the server between sending a group and knowing that it was taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollserve.testing.callback_receiver import Received, a_receiver
from rollserve.testing.scripted import ScriptedEngine
from rollserve.wire import OpenRun
from tests.integration.conftest import Server, add_policy, descendants, gone, shell_task, until

GROUPS = 8


async def test_a_receiver_that_knows_ids_has_each_group_once_though_the_server_is_killed(
    make_server: Callable[..., Server], backend_url: str, engine: ScriptedEngine
) -> None:
    engine.latency_s = 0.02
    server = make_server("delivery.callback_in_flight=2")
    await server.start()
    async with server.client() as client, a_receiver() as receiver:
        taken: dict[str, Received] = {}

        def answer(one: Received) -> int:
            taken.setdefault(one.id, one)
            return 200

        receiver.answer = answer
        await add_policy(client, backend_url)
        spec = {"policy": "tiny", "callback": {"url": receiver.url}, "callback_secret": receiver.secret}
        run = await client.open_run(OpenRun.model_validate(spec))
        await run.submit([shell_task()] * GROUPS, num_rollouts=2)

        async def one_more_is_sent() -> None:
            before = len(receiver.received)
            await until(lambda: len(receiver.received) > before)

        for _ in range(2):
            receiver.let.clear()
            await one_more_is_sent()
            below = descendants(server.pid)
            server.kill()
            receiver.let.set()  # its answer finds nobody
            await gone(below)
            await server.start()
        async with asyncio.timeout(90):
            while (await run.callback()).messages["sent"] < GROUPS:
                await asyncio.sleep(0.05)
        assert len(receiver.received) > GROUPS
        assert len({one.group_id for one in taken.values()}) == len(taken) == GROUPS
        assert (await run.status()).counts["groups_undelivered"] == 0
