"""Ports that a command gives to the processes it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rollserve.cli.processes import Processes


def test_a_port_is_kept_for_who_asks_for_it(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    port = processes.port()
    try:
        for _ in range(2):  # a server that is started again too
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 5)
            with socket.create_server(("127.0.0.1", port)):
                socket.create_connection(("127.0.0.1", port), 5).close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        assert processes.port() != port
    finally:
        processes.stop()
