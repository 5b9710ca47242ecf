"""One inference server has one address, however people write it: two would count its slots twice."""

from __future__ import annotations

import yarl

from rollserve.errors import InvalidInput


def root_of(url: str) -> str:
    """The server's root as it is kept: no ``/v1``, slash or query at the end, host in lower case, no port
    that goes without saying. Raises ``InvalidInput`` (field ``url``)."""
    if not url.startswith(("http://", "https://")):
        hint = f"did you mean 'http://{url}'?" if "://" not in url else None
        raise InvalidInput(f"{url!r} is no http:// or https:// address", field="url", hint=hint)
    try:
        parsed = yarl.URL(url.strip())
    except ValueError as error:
        raise InvalidInput(f"{url!r} is no address: {error}", field="url") from error
    return str(parsed.with_query(None).with_fragment(None)).rstrip("/").removesuffix("/v1").rstrip("/")
