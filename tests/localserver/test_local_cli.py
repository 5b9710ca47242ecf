"""The local server's command line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rollserve.localserver.cli import main


def test_a_taken_port_is_said_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", str(tmp_path / "no-model"), "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"can't listen on 127.0.0.1:{port}" in said
    assert "--port PORT" in said


def test_no_model_lets_the_port_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for this port alone, and not listening
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        for _ in range(2):
            assert main(["--model", str(tmp_path / "no-model"), "--port", str(port)]) == 2
    assert "can't listen" not in capsys.readouterr().err
