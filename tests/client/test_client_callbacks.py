"""What a receiver is sent is signed, and nothing else is taken."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

import pytest

from rollserve.client import Client, new_secret, verify_callback
from rollserve.errors import InvalidInput, Unauthenticated
from rollserve.webhooks import signed

BODY = '{"type": "é"}'.encode()


def test_headers_are_those_of_the_specification() -> None:
    """Made anew here, as its text says: base64 of HMAC-SHA256 over ``id.timestamp.body``."""
    secret = "whsec_" + base64.b64encode(b"k" * 24).decode()
    headers = signed(secret, "msg_1", 1_700_000_000.9, BODY)
    told = hmac.new(b"k" * 24, b"msg_1.1700000000." + BODY, hashlib.sha256).digest()
    assert headers == {
        "webhook-id": "msg_1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": f"v1,{base64.b64encode(told).decode()}",
    }


def test_what_is_signed_is_taken_whatever_the_case_of_its_headers() -> None:
    secret = new_secret()
    headers = signed(secret, "msg_1", time.time(), BODY)
    assert verify_callback(secret, {name.title(): value for name, value in headers.items()}, BODY) == "msg_1"


@pytest.mark.parametrize(
    "changed",
    [
        {"webhook-id": "msg_2"},
        {"webhook-timestamp": "1"},
        {"webhook-timestamp": "soon"},
        {"webhook-signature": "v1,AAAA"},
        {"webhook-signature": "nonsense"},
        {"webhook-signature": "v1,é"},
        {"webhook-signature": ""},
    ],
)
def test_anything_else_is_refused(changed: dict[str, str]) -> None:
    secret = new_secret()
    headers = signed(secret, "msg_1", time.time(), BODY)
    with pytest.raises(Unauthenticated):
        verify_callback(secret, headers | changed, BODY)


def test_another_body_or_secret_is_refused() -> None:
    secret = new_secret()
    headers = signed(secret, "msg_1", time.time(), BODY)
    for key, body in ((secret, BODY + b" "), (new_secret(), BODY), (secret, b"\xff")):
        with pytest.raises(Unauthenticated):
            verify_callback(key, headers, body)
    with pytest.raises(Unauthenticated):
        verify_callback(secret, signed(secret, "msg_1", time.time() - 400, BODY), BODY)


async def test_a_body_of_another_make_is_named() -> None:
    secret = new_secret()
    async with Client() as client:
        with pytest.raises(InvalidInput, match="not a callback"):
            client.callback(secret, signed(secret, "m", time.time(), b"[]"), b"[]")
