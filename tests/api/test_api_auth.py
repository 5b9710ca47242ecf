from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import httpx
import pytest

from rollserve.api.app import make_app
from rollserve.api.auth import Auth, ensure_admin_key, key_required
from rollserve.build.http import is_loopback
from rollserve.config import ApiSettings
from rollserve.testing.server_room import Room


@pytest.fixture
async def guarded(room: Room) -> AsyncIterator[httpx.AsyncClient]:
    """An application that needs a key."""
    app = make_app(room.core, ApiSettings(), Auth(room.store, required=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://example.org") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_the_admin_key_is_made_once_and_stored_hashed(room: Room) -> None:
    key = await ensure_admin_key(room.store)
    assert key is not None
    assert await ensure_admin_key(room.store) is None
    assert await room.store.find_key(hashlib.sha256(key.encode()).hexdigest()) == "admin"
    assert await room.store.find_key(key) is None


async def test_without_a_key_nothing_but_health_and_docs(guarded: httpx.AsyncClient) -> None:
    for path in ("/v1/status", "/v1/policies", "/metrics", "/v1/events", "/v1/nope"):
        answer = await guarded.get(path)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/healthz", "/readyz", "/openapi.json", "/docs"):
        assert (await guarded.get(path)).status_code == 200


async def test_the_admin_key_opens_everything(guarded: httpx.AsyncClient, room: Room) -> None:
    key = await ensure_admin_key(room.store)
    assert key is not None
    for _ in range(2):
        assert (await guarded.get("/v1/status", headers=bearer(key))).status_code == 200
    for wrong in ("", "x", key[:-1], "ses_secret"):
        assert (await guarded.get("/v1/status", headers=bearer(wrong))).status_code == 401
    basic = await guarded.get("/v1/status", headers={"Authorization": f"Basic {key}"})
    assert basic.status_code == 401


async def test_a_key_of_another_role_may_not(guarded: httpx.AsyncClient, room: Room) -> None:
    digest = hashlib.sha256(b"reader").hexdigest()
    await room.store.put_key(name="r", digest=digest, role="reader")
    answer = await guarded.get("/v1/status", headers=bearer("reader"))
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_on_loopback_no_key_is_needed_but_a_wrong_one_is_refused(api: httpx.AsyncClient) -> None:
    assert (await api.get("/v1/status")).status_code == 200
    assert (await api.get("/v1/status", headers=bearer("wrong"))).status_code == 401


async def test_on_loopback_a_web_page_may_not(api: httpx.AsyncClient) -> None:
    rebound = await api.get("/v1/status", headers={"Host": "evil.example"})
    assert (rebound.status_code, rebound.json()["field"]) == (403, "Host")
    crossing = await api.post("/v1/policies", json={}, headers={"Origin": "https://evil.example"})
    assert (crossing.status_code, crossing.json()["field"]) == (403, "Origin")
    for host in ("localhost:8700", "[::1]:8700", "127.0.0.1:8700"):
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert (await api.get("/v1/status", headers=headers)).status_code == 200


async def test_nothing_of_an_unauthenticated_request_is_read(guarded: httpx.AsyncClient) -> None:
    async def body() -> AsyncIterator[bytes]:
        pytest.fail("the body was asked for")
        yield b""

    assert (await guarded.post("/v1/policies", content=body())).status_code == 401


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False), ("", False),
     ("localhost.evil.org", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    assert key_required(ApiSettings(host=host)) is not loopback
    assert key_required(ApiSettings(host=host, require_key=True)) is True
