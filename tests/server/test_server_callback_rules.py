"""What a callback may be, and what an answer to a message means."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from rollserve.errors import Conflict, InvalidInput
from rollserve.records.run import RunSpec
from rollserve.rollouts.callbacks import PushBounds, judged, retry_after_s
from rollserve.rollouts.ports import PostAnswer
from rollserve.store.values import Outgoing
from rollserve.testing.server_room import Room
from rollserve.webhooks import new_secret

URL = "http://127.0.0.1:1/"


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("ftp://example.com/", "callback.url"),
        ("http:///nowhere", "callback.url"),
        ("http://user:pw@example.com/", "callback.url"),
        ("http://example.com:99999/", "callback.url"),
        ("http://10.0.0.1/", "callback.url"),
        ("http://169.254.169.254/latest", "callback.url"),
        ("http://[::ffff:10.0.0.1]/", "callback.url"),
    ],
)
async def test_a_url_that_nothing_is_sent_to_is_refused_at_once(room: Room, url: str, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await room.run(callback_secret=new_secret(), callback={"url": url})
    assert caught.value.field == field


@pytest.mark.parametrize("secret", [None, "", "whsec_short", "whsec_!!!", "plain text"])
async def test_a_callback_needs_a_secret_worth_the_name(room: Room, secret: str | None) -> None:
    with pytest.raises(InvalidInput) as caught:
        await room.run(callback_secret=secret, callback={"url": URL})
    assert caught.value.field == "callback_secret"
    assert secret is None or len(secret) < 6 or secret not in str(caught.value)


async def test_a_secret_needs_a_callback_and_a_key_the_same_secret(room: Room) -> None:
    secret = new_secret()
    with pytest.raises(InvalidInput):
        await room.run(callback_secret=secret)
    spec = RunSpec.model_validate({"policy": "pol", "callback": {"url": URL}})
    run = await room.core.runs.open(spec, "key", secret)
    assert (await room.core.runs.open(spec, "key", secret)).id == run.id
    with pytest.raises(Conflict):
        await room.core.runs.open(spec, "key", new_secret())


# -- what an answer means

BOUNDS = PushBounds(timeout_s=30, lease_s=300, at_once=4, tries=12, age_s=86400)
SENT = Outgoing(
    seq=1,
    message_id="m",
    run_id="r",
    type="t",
    url="u",
    secret=SecretStr("s"),
    data={},
    lease=None,
    tries=0,
    created_at=0.0,
)


@pytest.mark.parametrize(
    ("status", "state"),
    [(200, "sent"), (299, "sent"), (301, "pending"), (400, "pending"), (500, "pending"), (410, "pending")],
)
def test_any_2xx_acks_and_a_redirect_is_none(status: int, state: str) -> None:
    end = judged(PostAnswer(status), SENT, BOUNDS, now=1.0, jitter=1.0)
    assert (end.state.value, end.stop) == (state, status == 410)


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [(None, None), ("7", 7.0), ("soon", None), ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0), ("-3", None)],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, wait_s: float | None) -> None:
    assert retry_after_s(value, 10.0) == wait_s
