"""The HTTP client of callbacks: it speaks to addresses that whoever opens a run has named.

So an address is looked at after its name was resolved, at each connection: only public ones and those of the
networks that the settings name are spoken to. Redirects are not followed, proxies of the environment not
used, bodies of answers not read.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from rollserve.errors import InvalidInput, Unavailable
from rollserve.rollouts.ports import PostAnswer
from rollserve.sandbox.egress.addresses import AddressRules, Range


class Addresses:
    """Which may be spoken to: public ones, and those in ``networks``. Neither this machine's own nor what
    hides an address in another, unless ``networks`` names it."""

    def __init__(self, networks: Sequence[Range]) -> None:
        self._networks = networks
        self._rules = AddressRules()

    def allows(self, text: str) -> bool:
        """Raises ``ValueError`` for what is no address."""
        address = ip_address(text.partition("%")[0])
        if any(address.version == network.version and address in network for network in self._networks):
            return True
        return self._rules.fault(text) is None


def _refused(host: str) -> InvalidInput:
    return InvalidInput(
        f"{host} is no public address",
        field="callback.url",
        hint="delivery.callback_networks names the networks that may be spoken to beside those",
    )


class _Resolver(AbstractResolver):
    """Names to allowed addresses. Refuses a name that has any other: which is taken is not ours to say."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._names = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._names.resolve(host, port, family)
        if not all(self._addresses.allows(each["host"]) for each in found):
            raise _refused(host)
        return found

    async def close(self) -> None:
        await self._names.close()


class CallbackPoster:
    """``rollouts.ports.Poster``. ``close`` ends its connections."""

    def __init__(self, networks: Sequence[Range]) -> None:
        self._addresses = Addresses(networks)
        self._session: aiohttp.ClientSession | None = None

    def check(self, url: str, field: str) -> None:
        """What a name stands for is looked at when it is sent to: it may be another by then."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidInput(f"not a URL: {error}", field=field) from error
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidInput("an http or https URL with a host", field=field)
        if parts.username is not None or parts.password is not None:
            raise InvalidInput("no user or password in it: messages are signed", field=field)
        self._check_literal(host)

    def _check_literal(self, host: str) -> None:
        try:
            allowed = self._addresses.allows(host)
        except ValueError:  # a name
            return
        if not allowed:
            raise _refused(host)

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> PostAnswer:
        self._check_literal(urlsplit(url).hostname or "")  # the client resolves names only
        sent = {"Content-Type": "application/json", "User-Agent": "rollserve", **headers}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._client.post(
                url, data=body, headers=sent, timeout=timeout, allow_redirects=False
            ) as answer:
                return PostAnswer(answer.status, answer.headers.get("Retry-After"))
        except TimeoutError as error:
            raise Unavailable(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"no answer: {error or type(error).__name__}") from error

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0, resolver=_Resolver(self._addresses), use_dns_cache=False
            )
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
