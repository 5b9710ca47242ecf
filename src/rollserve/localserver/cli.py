"""Command line of the local inference server."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
import uvicorn

from rollserve.errors import RollserveError
from rollserve.localserver.model import BatchModel, load_model
from rollserve.localserver.server import LocalServer, ServerSettings, make_app


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="rollserve.localserver", description="A small inference server.")
    made.add_argument("--model", required=True, help="Hugging Face model directory")
    made.add_argument("--served-model-name", help="name in requests (default: the directory's name)")
    made.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    made.add_argument("--port", type=int, default=8300, help="(default: %(default)s)")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    made.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="(default: %(default)s)"
    )
    made.add_argument(
        "--max-batch", type=int, default=64, help="requests that run at once (default: %(default)s)"
    )
    made.add_argument("--max-waiting", type=int, default=4096, help="requests that may wait; more get 429")
    made.add_argument("--max-model-len", type=int, help="tokens of prompt and answer (default: the model's)")
    made.add_argument(
        "--threads", type=int, default=1, help="torch threads on the CPU (default: %(default)s)"
    )
    made.add_argument("--weight-version", default="default", help="version of the weights at the start")
    return made


def main(argv: Seq[str] | None = None) -> int:
    args = parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        listening = _bound(args.host, args.port)
    except OSError as error:
        sys.stderr.write(f"error: can't listen on {args.host}:{args.port}: {error.strerror or error}\n")
        sys.stderr.write("hint:  choose another with --port PORT\n")
        return 1
    with listening:
        return _serve(args, listening)


def _bound(host: str, port: int) -> socket.socket:
    """Taken before the model is loaded, which takes minutes; nobody is let in until it is. Raises
    ``OSError``."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _serve(args: argparse.Namespace, listening: socket.socket) -> int:
    try:
        module = load_model(args.model, device=args.device, dtype=args.dtype)
        model = BatchModel(module, max_batch=args.max_batch, max_model_len=args.max_model_len)
    except RollserveError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    settings = ServerSettings(
        served_model_name=args.served_model_name or Path(args.model).resolve().name,
        weight_version=args.weight_version,
        max_waiting=args.max_waiting,
    )
    config = uvicorn.Config(
        make_app(LocalServer(model, settings)),
        host=args.host,
        port=args.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=3,
    )
    try:
        _Server(config, settings.served_model_name).run(sockets=[listening])
    except KeyboardInterrupt:
        return 130
    return 0


class _Server(uvicorn.Server):
    """Says when it can be asked."""

    def __init__(self, config: uvicorn.Config, model: str) -> None:
        super().__init__(config)
        self._model = model

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            where = f"http://{self.config.host}:{self.config.port}"
            sys.stderr.write(f"serving {self._model!r} at {where} (Ctrl-C ends it)\n")
