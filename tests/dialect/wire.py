"""What an official client sends through, and hears from."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx2

from rollserve.testing.dialect_subject import Sent


class Wire:
    """A transport that keeps the request and answers what it is told."""

    def __init__(self) -> None:
        self.request = httpx2.Request("GET", "http://gateway")
        self._answer = httpx2.Response(400)
        self.http = httpx2.Client(transport=httpx2.MockTransport(self._serve))

    def answers(self, body: bytes, *, status: int = 200, kind: str = "application/json") -> None:
        self._answer = httpx2.Response(status, content=body, headers={"content-type": kind})

    def streams(self, body: bytes) -> None:
        self.answers(body, kind="text/event-stream")

    def sent(self) -> Sent:
        return Sent(
            path=urlsplit(str(self.request.url)).path,
            body=self.request.content,
            method=self.request.method,
            headers=dict(self.request.headers),
            query=dict(self.request.url.params),
        )

    def _serve(self, request: httpx2.Request) -> httpx2.Response:
        self.request = request
        return self._answer
