"""Lists of the API page by page, and bodies with their secrets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, SecretStr

from rollserve.client.http import Transport
from rollserve.wire import Listing

PAGE = 500


def plain(model: BaseModel) -> dict[str, Any]:
    """JSON-compatible data; secrets are sent as what they are."""
    data = model.model_dump(mode="json", exclude_unset=True)
    for name in model.model_fields_set:
        value = getattr(model, name)
        if isinstance(value, SecretStr):
            data[name] = value.get_secret_value()
    return data


async def pages(transport: Transport, path: str, **params: str | int | None) -> AsyncIterator[Any]:
    """The items of a list, page after page."""
    cursor: str | None = None
    while True:
        raw = await transport.request("GET", path, params={"limit": PAGE, **params, "cursor": cursor})
        page = Listing[Any].model_validate_json(raw)
        for item in page.items:
            yield item
        cursor = page.next
        if cursor is None:
            return
