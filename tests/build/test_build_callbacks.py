"""What callbacks are sent to: public addresses, and what the settings open."""

from __future__ import annotations

import socket
import time
from ipaddress import ip_network

import pytest
from aiohttp import web
from aiohttp.abc import ResolveResult

from rollserve.build.callbacks import Addresses, CallbackPoster
from rollserve.config import Settings
from rollserve.errors import InvalidInput, Unavailable
from rollserve.testing.callback_receiver import a_receiver
from rollserve.webhooks import signed


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("168.63.129.16", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("fe80::1%1", False),
    ],
)
def test_loopback_and_public_addresses_are_spoken_to(address: str, allowed: bool) -> None:
    assert Addresses(Settings().delivery.callback_networks).allows(address) is allowed


def test_the_settings_open_networks_and_close_loopback() -> None:
    addresses = Addresses([ip_network("10.0.0.0/8")])
    assert addresses.allows("10.1.2.3")
    assert not addresses.allows("127.0.0.1")


async def test_a_name_is_looked_at_each_time_it_is_resolved() -> None:
    """It is what the address is that counts, not what it was when the run was opened."""
    poster = CallbackPoster([])
    poster.check("http://localhost:1/", "callback.url")
    with pytest.raises(InvalidInput, match="no public address"):
        await poster.post("http://localhost:1/", {}, b"", 5.0)
    with pytest.raises(InvalidInput, match="no public address"):
        await poster.post("http://127.0.0.1:1/", {}, b"", 5.0)
    with pytest.raises((InvalidInput, Unavailable)):
        await poster.post("http://2130706433:1/", {}, b"", 5.0)
    await poster.close()


async def test_a_name_with_one_address_that_is_closed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(host: str) -> ResolveResult:
        return ResolveResult(hostname="two.test", host=host, port=1, family=socket.AF_INET, proto=0, flags=0)

    async def resolve(*_: object) -> list[ResolveResult]:
        return [answer("8.8.8.8"), answer("10.0.0.1")]

    monkeypatch.setattr("aiohttp.ThreadedResolver.resolve", resolve)
    poster = CallbackPoster([])
    with pytest.raises(InvalidInput, match=r"two\.test"):
        await poster.post("http://two.test:1/", {}, b"", 5.0)
    await poster.close()


async def test_no_redirect_is_followed() -> None:
    async with a_receiver() as receiver:
        receiver.answer = lambda _: 307
        receiver.headers = {"Location": receiver.url, "Retry-After": "3"}
        poster = CallbackPoster(Settings().delivery.callback_networks)
        body = b'{"type": "t", "data": {}}'
        answer = await poster.post(receiver.url, signed(receiver.secret, "m", time.time(), body), body, 5.0)
        assert (answer.status, answer.retry_after) == (307, "3")
        assert len(receiver.received) == 1
        await poster.close()


async def test_an_answer_cut_short_is_no_answer() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    app = web.Application()
    app.router.add_post("/", cut)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    poster = CallbackPoster(Settings().delivery.callback_networks)
    with pytest.raises(Unavailable, match="no answer"):
        await poster.post(f"http://127.0.0.1:{runner.addresses[0][1]}/", {}, b"", 5.0)
    await poster.close()
    await runner.cleanup()
