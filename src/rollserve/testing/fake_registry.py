"""A small registry over HTTP, for tests: serves images by tag and digest, can ask for a token, break off in
the middle of a blob, be busy, or hand out other bytes than were asked for."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from rollserve.testing.image_files import TestImage

TOKEN = "a-token"


@dataclass
class FakeRegistry:
    """``images`` by ``name:tag``. ``user`` makes a token necessary; ``breaks`` is how often a blob's transfer
    is cut in its middle, ``busy`` how often the answer is 503 first; ``forged`` replaces blobs."""

    images: dict[str, TestImage] = field(default_factory=dict)
    user: tuple[str, str] | None = None
    breaks: int = 0
    busy: int = 0
    forged: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    host: str = ""

    def find(self, path: str) -> tuple[bytes, str] | None:
        name, _, rest = path.removeprefix("/v2/").partition("/manifests/")
        if rest:
            by_digest = rest.startswith("sha256:")
            image = self._by_name(name) if by_digest else self.images.get(f"{name}:{rest}")
            if image is None:
                return None
            digest = rest if by_digest else image.manifest["digest"]
            data = image.blobs.get(digest)
            return None if data is None else (data, str(image.manifest["mediaType"]))
        name, _, digest = path.removeprefix("/v2/").partition("/blobs/")
        image = self._by_name(name)
        data = self.forged.get(digest) or (image.blobs.get(digest) if image else None)
        return None if data is None else (data, "application/octet-stream")

    def _by_name(self, name: str) -> TestImage | None:
        return next((image for key, image in self.images.items() if key.rpartition(":")[0] == name), None)


@contextmanager
def serving_registry(registry: FakeRegistry) -> Iterator[FakeRegistry]:
    """On a free port of the loopback address."""

    class Handler(_Handler):
        fake = registry

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    registry.host = f"127.0.0.1:{server.server_address[1]}"
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeRegistry

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self.fake.requests.append(self.path)
        where = urlsplit(self.path)
        if where.path == "/token":
            self._token(parse_qs(where.query))
        elif self.fake.busy:
            self.fake.busy -= 1
            self._answer(503, b"busy", headers={"Retry-After": "0"})
        elif self.fake.user is not None and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            realm = f'Bearer realm="http://{self.fake.host}/token",service="fake",scope="repository:x:pull"'
            self._answer(401, b"{}", headers={"WWW-Authenticate": realm})
        else:
            found = self.fake.find(where.path)
            if found is None:
                self._answer(404, b"{}")
            else:
                self._content(*found)

    def _token(self, query: dict[str, list[str]]) -> None:
        wanted = "Basic " + base64.b64encode(":".join(self.fake.user or ("", "")).encode()).decode()
        if self.headers.get("Authorization") == wanted and query.get("service") == ["fake"]:
            self._answer(200, b'{"token": "%s"}' % TOKEN.encode())
        else:
            self._answer(401, b"{}")

    def _content(self, data: bytes, media_type: str) -> None:
        said = self.headers.get("Range")
        start = int(said.removeprefix("bytes=").rstrip("-")) if said else 0
        cut = "/blobs/" in self.path and self.fake.breaks > 0
        if cut:
            self.fake.breaks -= 1
        self._answer(206 if said else 200, data[start:], kind=media_type, cut=cut)

    def _answer(
        self,
        status: int,
        body: bytes,
        *,
        headers: dict[str, str] | None = None,
        kind: str = "application/json",
        cut: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
