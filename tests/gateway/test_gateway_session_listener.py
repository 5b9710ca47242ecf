"""Sessions served to sandboxes elsewhere: real sockets, real TLS, and strangers at the door."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollserve.build.connections import IdleBounds
from rollserve.build.session_address import SessionAddresses, read_session_addresses
from rollserve.build.session_listener import SessionListener, session_listener
from rollserve.build.tls import server_context
from rollserve.config import Settings
from rollserve.gateway.bound import bounded
from rollserve.gateway.http import make_app
from rollserve.gateway.sessions import GatewaySession
from rollserve.rollouts.worker_ports import SessionAddress
from rollserve.testing.certificates import Authority

from .conftest import World, eventually
from .serving import serving

HI = {"messages": [{"role": "user", "content": "hi"}]}
MAX_BYTES = 1_000_000
WITHIN_S = 20.0
LONG_S = 600.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def addresses(authority: Authority) -> SessionAddresses:
    signed = authority.sign()
    told = {
        "url": "https://127.0.0.1:{port}",
        "host": "127.0.0.1",
        "ports": "20000-29999",
        "certificate_file": signed.certificate,
        "key_file": signed.key,
        "ca_file": authority.file,
    }
    found = read_session_addresses(Settings.model_validate({"session_address": told}))
    assert found is not None
    return found


@pytest.fixture
async def address(world: World, addresses: SessionAddresses) -> AsyncIterator[SessionAddress]:
    app = bounded(make_app(world.service, max_body_bytes=MAX_BYTES), 16)
    async with session_listener(addresses, app) as found:
        assert found is not None
        yield found


def trusting(authority: Authority | None) -> ssl.SSLContext:
    """A client's; ``None`` trusts nobody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority is not None:
        context.load_verify_locations(authority.file)
    return context


async def ask(
    url: str, secret: str, authority: Authority | None, path: str = "/chat/completions", body: Any = HI
) -> httpx.Response:
    async with httpx.AsyncClient(verify=trusting(authority), timeout=30) as client:
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        return await client.post(f"{url}{path}", json=body, headers=headers)


def base_url(address: SessionAddress, session: GatewaySession) -> str:
    return f"{address.url}/s/{session.id}/v1"


async def test_a_session_is_served_by_tls(
    world: World, address: SessionAddress, authority: Authority
) -> None:
    session = await world.open()
    assert address.url.startswith("https://127.0.0.1:2")
    assert address.authority == authority.file.read_bytes()
    for url in (base_url(address, session), f"{address.url}/v1"):
        answer = await ask(url, session.secret, authority)
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
    assert len(session.call_ids) == 2


async def test_a_stream_is_served_too(world: World, address: SessionAddress, authority: Authority) -> None:
    session = await world.open()
    answer = await ask(base_url(address, session), session.secret, authority, body={**HI, "stream": True})
    assert answer.text.rstrip().endswith("data: [DONE]")


async def test_refusals_are_those_of_the_workers_own_listener(
    world: World, address: SessionAddress, authority: Authority
) -> None:
    session, other = await world.open(), await world.open()
    over = await world.open()
    await over.close()
    async with serving(world) as plain:
        for secret, url_of_session, path in (
            ("nobody's", session, "/chat/completions"),
            ("", session, "/chat/completions"),
            (other.secret, session, "/chat/completions"),
            (over.secret, over, "/chat/completions"),
            (session.secret, session, "/nothing"),
        ):
            here = await ask(f"{plain}/s/{url_of_session.id}/v1", secret, None, path)
            there = await ask(base_url(address, url_of_session), secret, authority, path)
            assert there.status_code == here.status_code >= 400
            assert there.json() == here.json()
    assert session.call_ids == other.call_ids == []


@pytest.mark.parametrize(
    "path", ["/v1/runs", "/v1/status", "/v1/policies", "/metrics", "/docs", "/openapi.json", "/readyz", "/"]
)
async def test_the_control_api_is_not_there(
    world: World, address: SessionAddress, authority: Authority, path: str
) -> None:
    session = await world.open()
    async with httpx.AsyncClient(verify=trusting(authority), timeout=30) as client:
        headers = {"authorization": f"Bearer {session.secret}"}
        answer = await client.get(f"{address.url}{path}", headers=headers)
    assert answer.status_code == 404


async def test_a_large_body_is_refused(world: World, address: SessionAddress, authority: Authority) -> None:
    session = await world.open()
    body = {"messages": [{"role": "user", "content": "x" * MAX_BYTES}]}
    answer = await ask(base_url(address, session), session.secret, authority, body=body)
    assert answer.status_code == 413


# -- trust -----------------------------------------------------------------------------------------------


async def test_who_trusts_another_authority_sends_nothing(
    world: World, address: SessionAddress, tmp_path: Path
) -> None:
    session = await world.open()
    for other in (Authority(tmp_path, "another"), None):
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await ask(base_url(address, session), session.secret, other)
    assert session.call_ids == []


async def test_plain_http_is_not_answered(world: World, address: SessionAddress) -> None:
    session = await world.open()
    with pytest.raises(httpx.TransportError):
        await ask(base_url(address, session).replace("https", "http"), session.secret, None)


async def test_an_old_protocol_is_not_spoken(address: SessionAddress, authority: Authority) -> None:
    context = trusting(authority)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port_of(address.url), ssl=context)


# -- strangers -------------------------------------------------------------------------------------------


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


@asynccontextmanager
async def listening(world: World, authority: Authority, **bounds: Any) -> AsyncIterator[int]:
    """Its port."""
    signed = authority.sign()
    tls = server_context(signed.certificate, signed.key, section="x")
    sock = socket.create_server(("127.0.0.1", 0))
    listener = SessionListener(make_app(world.service), sock, tls, **bounds)
    listener.start()
    try:
        yield sock.getsockname()[1]
    finally:
        await listener.stop()


async def closed(reader: asyncio.StreamReader) -> None:
    try:
        async with asyncio.timeout(WITHIN_S):
            await reader.read()
    except ConnectionError:
        return


async def test_a_handshake_that_does_not_come_is_given_up(world: World, authority: Authority) -> None:
    async with listening(world, authority, handshake_s=0.05) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01")
        await closed(reader)
        writer.close()


async def test_many_that_do_not_come_make_place_for_one_that_does(world: World, authority: Authority) -> None:
    session = await world.open()
    async with listening(world, authority, handshake_s=LONG_S, handshakes=3) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        answer = await ask(f"https://127.0.0.1:{port}/v1", session.secret, authority)
        assert answer.status_code == 200
        for reader, _ in silent[:5]:
            await closed(reader)
        for _, writer in silent:
            writer.close()


async def test_a_request_that_does_not_come_is_given_up(world: World, authority: Authority) -> None:
    async with listening(world, authority, idle=IdleBounds(head_s=0.05)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
        await closed(reader)
        writer.close()


async def test_idle_connections_are_bounded(world: World, authority: Authority) -> None:
    idle = IdleBounds(head_s=LONG_S, connections=2)
    async with listening(world, authority, idle=idle) as port:
        held = [await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority)) for _ in range(4)]
        for reader, _ in held[:2]:
            await closed(reader)
        assert not held[3][0].at_eof()
        for _, writer in held:
            writer.close()


def _leaves_without_a_word(port: int, authority: Authority) -> None:
    """Has its answer, and does not take part in the end of TLS: until the connection is gone. Blocking."""
    with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as below:
        raw = below.dup()
        with raw, trusting(authority).wrap_socket(below, server_hostname="127.0.0.1") as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            while raw.recv(65_536):
                continue


async def test_who_does_not_say_goodbye_is_let_go(world: World, authority: Authority) -> None:
    async with listening(world, authority, goodbye_s=0.05) as port:
        await asyncio.to_thread(_leaves_without_a_word, port, authority)


async def test_leaving_ends_handshakes_connections_and_answers(world: World, authority: Authority) -> None:
    world.pool.gate = asyncio.Event()
    session = await world.open()
    async with listening(world, authority, handshake_s=LONG_S) as port:
        asking = asyncio.create_task(ask(f"https://127.0.0.1:{port}/v1", session.secret, authority))
        await eventually(lambda: world.pool.requests != [])
        silent = await asyncio.open_connection("127.0.0.1", port)
        idle = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
        await session.close()
    assert (await asking).status_code == 400
    for reader, writer in (silent, idle):
        await closed(reader)
        writer.close()
    with pytest.raises(httpx.ConnectError):
        await ask(f"https://127.0.0.1:{port}/v1", session.secret, authority)


async def test_workers_take_a_port_each(world: World, addresses: SessionAddresses) -> None:
    app = make_app(world.service)
    async with session_listener(addresses, app) as one, session_listener(addresses, app) as other:
        assert one is not None
        assert other is not None
        assert one.url != other.url
    async with session_listener(None, app) as none:
        assert none is None
