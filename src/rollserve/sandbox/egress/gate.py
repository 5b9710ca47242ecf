"""Decides where a connection may go, and opens it: names are looked up once per connection, every address is
checked, and what is connected to is the address that was checked."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from rollserve.records.network import AllowedHosts
from rollserve.sandbox.egress.addresses import AddressRules

Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
Dial: TypeAlias = Callable[[str, int], Awaitable[Stream]]

LOOK_UPS = 4
"""Of one sandbox at once."""

_LOGGED = 200
_READ_BYTES = 65536


class RefusedError(Exception):
    """Answered with ``status`` and its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class SystemResolver:
    """By this machine's resolver, in threads of its own: a look-up can't be stopped, and those that hang must
    not keep the worker's other work waiting."""

    def __init__(self, threads: int = 16) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="lookup")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Raises ``OSError``."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def dial(address: str, port: int) -> Stream:
    return await asyncio.open_connection(address, port, limit=_READ_BYTES)


@dataclass(frozen=True, kw_only=True)
class Internet:
    """How names are looked up and addresses connected to."""

    resolve: Resolve = field(default_factory=SystemResolver)
    dial: Dial = dial


class Verdicts:
    """Tells the attempt's log each destination and what was decided, once per destination, so many at most:
    a sandbox that asks for ever more must not fill the log. The rest is counted."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._told: set[tuple[str, int, str]] = set()
        self.counts: Counter[str] = Counter()

    def tell(self, host: str, port: int, verdict: str) -> None:
        allowed = verdict.startswith("allowed")
        self.counts["allowed" if allowed else "refused"] += 1
        key = (host, port, verdict)
        if key in self._told or len(self._told) >= _LOGGED:
            return
        self._told.add(key)
        self._log(f"network: {host[:253]}:{port} {verdict}")
        if len(self._told) == _LOGGED:
            self._log("network: further destinations are counted, and not told one by one")

    def sum_up(self, sent_bytes: int) -> None:
        if self.counts:
            self._log(
                f"network: {self.counts['allowed']} connections allowed, {self.counts['refused']} refused, "
                f"{sent_bytes} bytes both ways"
            )


class Gate:
    """``hosts`` None lets through to any host whose addresses may be connected to."""

    def __init__(
        self,
        hosts: AllowedHosts | None,
        *,
        rules: AddressRules,
        verdicts: Verdicts,
        internet: Internet,
        connect_s: float,
    ) -> None:
        self._hosts = hosts
        self._rules = rules
        self._verdicts = verdicts
        self._internet = internet
        self._connect_s = connect_s
        self._looking = asyncio.Semaphore(LOOK_UPS)

    async def open(self, host: str, port: int) -> Stream:
        """``host`` as ``records.network.split_host`` spells it. Raises ``RefusedError``: 403 where it may not
        go, 502 or 504 where nothing is."""
        if self._hosts is not None and not self._hosts.allows(host, port):
            raise self._refused(host, port, "the task's network does not allow this host and port")
        try:
            async with asyncio.timeout(self._connect_s):
                addresses = await self._checked(host, port)
                stream = await self._connected(addresses, port)
        except TimeoutError:
            self._verdicts.tell(host, port, "failed: no answer in time")
            raise RefusedError(504, f"{host}:{port} did not answer in {self._connect_s:g} s") from None
        except OSError as error:
            self._verdicts.tell(host, port, "failed: can't be reached")
            raise RefusedError(502, f"{host}:{port} can't be reached: {error.strerror or error}") from None
        self._verdicts.tell(host, port, "allowed")
        return stream

    async def _checked(self, host: str, port: int) -> list[str]:
        """One address that is closed closes the name: an answer of both kinds is an attack, or useless."""
        try:
            addresses = await self._looked_up(host, port)
        except UnicodeError as error:
            raise RefusedError(400, f"{host} is no host name") from error
        for address in addresses:
            fault = self._rules.fault(address)
            if fault is not None:
                leads = "" if address == host else f" leads to {address}, which"
                raise self._refused(host, port, f"{host}{leads} is closed: {fault}")
        if not addresses:
            raise OSError("no address")
        return addresses

    async def _looked_up(self, host: str, port: int) -> list[str]:
        """A look-up that is given up keeps its place until it has ended."""
        await self._looking.acquire()
        looking = asyncio.ensure_future(self._internet.resolve(host, port))
        looking.add_done_callback(self._looked)
        return await asyncio.shield(looking)

    def _looked(self, looking: asyncio.Future[list[str]]) -> None:
        self._looking.release()
        if not looking.cancelled():
            looking.exception()

    async def _connected(self, addresses: list[str], port: int) -> Stream:
        last = OSError("no address")
        for address in addresses:
            try:
                return await self._internet.dial(address, port)
            except OSError as error:
                last = error
        raise last

    def _refused(self, host: str, port: int, why: str) -> RefusedError:
        self._verdicts.tell(host, port, f"refused: {why}")
        return RefusedError(403, f"{host}:{port} is refused: {why}")
