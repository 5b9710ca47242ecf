"""A task's network in a real server: refused at submit, and kept to while the agent runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest

from rollserve.errors import InvalidInput
from rollserve.records.network import AllowedHosts
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.testing.scripted_turns import episode
from tests.integration.conftest import Server, one

pytestmark = pytest.mark.skipif(
    shutil.which("python3", path="/usr/bin:/bin") is None, reason="sandboxes of this machine have no python3"
)

ASK = (
    "import os, urllib.request, urllib.error\n"
    "assert os.environ['https_proxy'].startswith('http://127.0.0.1:')\n"
    "for url in ('http://169.254.169.254/', 'http://other.test/', 'http://site.test:8700/'):\n"
    "    try: urllib.request.urlopen(url, timeout=20)\n"
    "    except urllib.error.HTTPError as error: print(error.code, error.read().decode())\n"
)


async def test_a_network_is_refused_unless_the_operator_allows_it(server: Server, backend_url: str) -> None:
    async with server.client() as client:
        with pytest.raises(InvalidInput, match="sandboxes have no network on this server") as caught:
            await one(client, backend_url, network="full")
        assert caught.value.field is not None
        assert caught.value.field.endswith("network")


async def test_an_agent_is_kept_to_its_list_and_the_log_says_so(
    make_server: Callable[..., Server], engine: ScriptedEngine, runtime: str
) -> None:
    if runtime != "bubblewrap":
        pytest.skip("no sandbox here has a network of its own")
    server = make_server("network.tasks_may_ask=hosts")
    await server.start()
    command = json.dumps({"command": "python3 ask.py; echo asked"})
    turns = episode(turns=2, tokens=20, tool="shell", arguments=command, final_text="42")
    network = AllowedHosts(allow=["site.test", "169.254.169.254"])
    async with serving(ScriptedApp(engine, turns)) as url, server.client() as client:
        group = await one(client, url, network=network, files={"ask.py": ASK})
        (rollout,) = group.rollouts
        assert rollout.reward == 1.0
        attempt = (await client.rollout(rollout.rollout.id)).last_attempt
        assert attempt is not None
        log = [line for _, line in await client.log(attempt.id) if line.startswith("network: ")]
        assert log == [
            "network: 169.254.169.254:80 refused: 169.254.169.254 is closed: link-local, metadata",
            "network: other.test:80 refused: the task's network does not allow this host and port",
            "network: site.test:8700 refused: the task's network does not allow this host and port",
            "network: 0 connections allowed, 3 refused, 0 bytes both ways",
        ]
