"""Ids in paths, and servers that say nothing."""

from __future__ import annotations

import logging
import socket

import pytest

from rollserve.client import Client, Unreachable
from rollserve.client.http import part
from rollserve.errors import InvalidInput, NotFound
from tests.integration.conftest import Server


@pytest.mark.parametrize("name", ["", ".", "..", "a/b?c", "../x y"])
def test_what_would_be_another_path_is_no_id(name: str) -> None:
    with pytest.raises(InvalidInput, match="no id or name"):
        part(name)


@pytest.mark.parametrize("name", ["x y", "a?b", "a#b", "50%", "ü", "%2e%2e"])
async def test_a_strange_id_reaches_the_server_as_it_is(server: Server, name: str) -> None:
    async with server.client() as client:
        with pytest.raises(NotFound) as caught:
            await client.rollout(name)
    assert repr(name) in caught.value.message
    assert caught.value.field == "rollout_id"


async def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the kernel takes connections, nobody reads
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with Client(url, timeout_s=0.1, patience_s=0) as client:
            with pytest.raises(Unreachable, match=r"something is there and said nothing for 0\.1 s"):
                await client.status()


async def test_trying_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:  # bound and not listening: it refuses
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with caplog.at_level(logging.WARNING, "rollserve.client"):
            async with Client(url, patience_s=2) as client:
                with pytest.raises(Unreachable):
                    await client.status()
    (said,) = caplog.messages
    assert f"no answer from {url}" in said
    assert "trying again for up to 2 s" in said
