"""The client that every command speaks through."""

from __future__ import annotations

from rollserve.cli.options import Where
from rollserve.client import Client

PATIENCE_S = 3.0
"""A person at a terminal would rather hear at once that there is no server."""


def connect(where: Where) -> Client:
    return Client(*where, patience_s=PATIENCE_S)
