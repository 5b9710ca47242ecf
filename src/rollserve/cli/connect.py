"""The client that every command speaks through."""

from __future__ import annotations

from rollserve.cli.options import Where
from rollserve.client import Client

PATIENCE_S = 3.0
"""A person at a terminal would rather hear at once that there is no server."""

RESTART_S = 60.0
"""One who waits anyway would rather wait for a server that is started again."""

LOOK_S = 10.0
"""A server that is well answers a plain question in less."""
WORK_S = 120.0
"""What a request may take that has the server probe, wait or compute."""


def connect(where: Where, *, timeout_s: float = WORK_S) -> Client:
    return Client(*where, timeout_s=timeout_s, patience_s=PATIENCE_S)


def stay(where: Where) -> Client:
    """For what waits for the run's results."""
    return Client(*where, timeout_s=WORK_S, patience_s=RESTART_S)


def look(where: Where) -> Client:
    """For commands that only read what is there."""
    return connect(where, timeout_s=LOOK_S)
