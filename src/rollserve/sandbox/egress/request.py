"""One request to a forward proxy, read strictly and written anew: what goes on is what was understood, so no
other reader can find another request, or another host, in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import httptools

from rollserve.records.network import split_host
from rollserve.sandbox.egress.gate import RefusedError

CONNECT = b"CONNECT"
_ABSOLUTE = re.compile(rb"http://([^/?#@\\\s]+)(/[^#\s]*|\?[^#\s]*)?", re.IGNORECASE)
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_ON = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te trailer "
    b"transfer-encoding upgrade host content-length expect".split()
)


@dataclass
class Request:
    """Fed as it comes. ``whole`` once its last byte was read; what comes after is left. ``head_bytes`` bounds
    the head. Of a tunnel, ``rest`` is what came after the head."""

    head_bytes: int
    read_head: bool = False
    whole: bool = False
    rest: bytes = b""
    _url: bytes = b""
    _headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    _body: list[bytes] = field(default_factory=list)
    _seen: int = 0

    def __post_init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    # -- what the parser calls
    def on_url(self, url: bytes) -> None:
        if not self.whole:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.read_head:
            self._headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        self.read_head = True

    def on_body(self, body: bytes) -> None:
        if not self.whole:
            self._body.append(body)

    def on_message_complete(self) -> None:
        self.whole = True

    # -- what its owner does
    def feed(self, data: bytes) -> None:
        """Raises ``RefusedError`` for what is no request, or no request to a proxy."""
        if not self.read_head:
            self._seen += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.rest = data[upgrade.args[0] :]
            if not self.tunnel:
                raise RefusedError(400, "a plain request can't be upgraded: use CONNECT") from None
        except httptools.HttpParserError as error:
            if not self.whole:  # what comes after the request is nobody's
                raise RefusedError(400, f"this is no request: {error}") from None
        if not self.read_head and self._seen > self.head_bytes:
            raise RefusedError(431, f"the head of the request has more than {self.head_bytes} bytes")

    @property
    def tunnel(self) -> bool:
        return bool(self._parser.get_method() == CONNECT)

    def target(self) -> tuple[str, int]:
        """Host and port, of a request whose head was read. Raises ``RefusedError``."""
        if self.tunnel:
            host, port = _split(self._url)
            if port is None:
                raise RefusedError(400, "CONNECT takes host:port")
            return host, port
        found = _ABSOLUTE.fullmatch(self._url)
        if found is None:
            raise RefusedError(400, "this is a proxy: ask for http://host/path, or CONNECT host:port for TLS")
        host, port = _split(found[1])
        self._check_host(host, port or 80)
        return host, port or 80

    def _check_host(self, host: str, port: int) -> None:
        said = self._all(b"host")
        if len(said) > 1:
            raise RefusedError(400, "the request names its host more than once")
        if said:
            name, number = _split(said[0])
            if (name, number or 80) != (host, port):
                raise RefusedError(400, "the request's Host is another than that of its address")

    def head(self) -> bytes:
        """As the server gets it; the connection is for this request alone. Raises ``RefusedError``."""
        found = _ABSOLUTE.fullmatch(self._url)
        assert found is not None
        path = found[2] or b"/"
        lines = [b"%s %s HTTP/1.1" % (self._parser.get_method(), path if path[:1] == b"/" else b"/" + path)]
        lines.append(b"Host: " + found[1])
        hidden = _NOT_ON.union(
            *({name.strip().lower() for name in value.split(b",")} for value in self._all(b"connection"))
        )
        for name, value in self._headers:
            if not _TOKEN.fullmatch(name) or any(sign in value for sign in (b"\r", b"\n", b"\0")):
                raise RefusedError(400, "a header of the request is malformed")
            if name not in hidden:
                lines.append(name + b": " + value)
        lines += [*self._framing(), b"Connection: close", b"", b""]
        return b"\r\n".join(lines)

    def _framing(self) -> list[bytes]:
        lengths, codings = self._all(b"content-length"), self._all(b"transfer-encoding")
        if codings and (lengths or len(codings) > 1 or codings[0].lower() != b"chunked"):
            raise RefusedError(400, "the request says in two ways where it ends, or in none that is known")
        if len(lengths) > 1 or any(not length.isdigit() for length in lengths):
            raise RefusedError(400, "the request's Content-Length is malformed")
        if codings:
            return [b"Transfer-Encoding: chunked"]
        return [b"Content-Length: " + length for length in lengths]

    def body(self) -> bytes:
        """What of it was read since the last time, framed as ``head`` says."""
        parts, self._body = self._body, []
        if not self._all(b"transfer-encoding"):
            return b"".join(parts)
        framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part)
        return framed + (b"0\r\n\r\n" if self.whole else b"")

    def _all(self, name: bytes) -> list[bytes]:
        return [value for known, value in self._headers if known == name]


def _split(authority: bytes) -> tuple[str, int | None]:
    try:
        return split_host(authority.decode("ascii"))
    except ValueError as error:
        raise RefusedError(400, f"this is no host: {error}") from None
