"""Signed messages as the Standard Webhooks specification has them; the one door to its library.

A secret is ``whsec_`` and 24 to 64 bytes in base64. What is signed (HMAC-SHA256) is the message's id, the
time of the try and the body, so that neither can be exchanged; a receiver refuses what is older than five
minutes.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime

from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from rollserve.errors import InvalidInput, Unauthenticated

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"

_PREFIX = "whsec_"
_KEY_BYTES = range(24, 65)


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def check_secret(secret: str, field: str) -> None:
    """Raises ``InvalidInput``, which does not repeat the secret."""
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) not in _KEY_BYTES:
        raise InvalidInput(
            f"a secret is {_PREFIX} and {_KEY_BYTES.start} to {_KEY_BYTES.stop - 1} bytes in base64",
            field=field,
            hint="rollserve.client.new_secret() makes one",
        )


def signed(secret: str, message_id: str, at: float, body: bytes) -> dict[str, str]:
    """The headers of one try at ``at`` (seconds since the epoch); ``body`` is UTF-8."""
    moment = datetime.fromtimestamp(int(at), tz=UTC)
    return {
        ID_HEADER: message_id,
        TIMESTAMP_HEADER: str(int(at)),
        SIGNATURE_HEADER: Webhook(secret).sign(message_id, moment, body.decode()),
    }


def verify(secret: str, headers: Mapping[str, str], body: bytes) -> str:
    """The message's id. Raises ``Unauthenticated`` for what was not signed with ``secret``, was changed on
    the way, or is older (or newer) than five minutes."""
    given = {name.lower(): value for name, value in headers.items()}
    try:
        Webhook(secret).verify(body, given, json_parse=False)
    except (WebhookVerificationError, ValueError) as error:  # a ValueError: headers that are no such headers
        raise Unauthenticated(f"not a message signed with this secret: {error}") from error
    return given[ID_HEADER]
