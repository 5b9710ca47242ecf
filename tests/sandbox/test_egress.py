"""The way out of a sandbox: who is let through, where to, and with how much."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rollserve.records.network import AllowedHosts, Network, split_host
from rollserve.sandbox.egress.addresses import AddressRules, is_own
from rollserve.sandbox.egress.gate import LOOK_UPS
from rollserve.sandbox.egress.proxy import TOLD, Egress, EgressBounds
from rollserve.testing.fake_internet import OTHER_SITE, SITE, FakeInternet
from rollserve.testing.runtime_probes import open_descriptors

NAMES = {"site.test": [[SITE]], "other.test": [[OTHER_SITE]], "inner.test": [["10.1.2.3"]]}


class Way:
    """A proxy on a loopback port, and what it wrote to the log."""

    def __init__(self, port: int, net: FakeInternet, log: list[str], env: dict[str, str]) -> None:
        self.port, self.net, self.log, self.env = port, net, log, env

    async def ask(self, request: bytes, *, then: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            if then:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(then)
            async with asyncio.timeout(20):
                return await reader.read(-1)
        finally:
            writer.transport.abort()

    async def get(self, url: str, host: str = "") -> bytes:
        line = f"Host: {host}\r\n" if host else ""
        return await self.ask(f"GET {url} HTTP/1.1\r\n{line}\r\n".encode())

    async def connect(self, target: str) -> bytes:
        return await self.ask(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())


@asynccontextmanager
async def way(
    network: Network = "full",
    *,
    names: dict[str, list[list[str]]] | None = None,
    reach: str = "",
    deny: str = "",
    **bounds: Any,
) -> AsyncIterator[Way]:
    net = FakeInternet({**NAMES, **(names or {})})
    log: list[str] = []
    rules = AddressRules(
        reach=[ip_network(reach)] if reach else (),
        deny=[ip_network(deny)] if deny else (),
        own=lambda address: str(address) == "10.9.9.9",
    )
    egress = Egress(rules=rules, bounds=EgressBounds(**bounds), internet=net.internet)
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    try:
        async with egress.serve(network, sock, log=log.append) as env:
            yield Way(port, net, log, dict(env))
    finally:
        await net.close()
    assert sock.fileno() == -1


def hosts(*patterns: str) -> AllowedHosts:
    return AllowedHosts(allow=list(patterns))


# -- names and patterns -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PyPI.org", ("pypi.org", None)),
        ("pypi.org.:8080", ("pypi.org", 8080)),
        ("1.2.3.4:80", ("1.2.3.4", 80)),
        ("[2606:2800::1]:443", ("2606:2800::1", 443)),
        ("my_host", ("my_host", None)),
    ],
)
def test_a_host_has_one_spelling(text: str, expected: tuple[str, int | None]) -> None:
    assert split_host(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "a b", "a..b", "-a", "a@b", "a/b", "a" * 300, "ex\u0430mple.org"),
        *("0x7f000001", "2130706433", "127.1", "0177.0.0.1", "0x7f.0.0.1", "1.2.3.4.5", "x.0x1"),
        *("a:0", "a:65536", "a:1:2", "a:+1", "a:\u0663", "[::1", "[fe80::1%eth0]", "[1.2.3.4]", "::1"),
    ],
)
def test_what_others_might_read_otherwise_is_no_host(text: str) -> None:
    with pytest.raises(ValueError):
        split_host(text)


def test_which_hosts_a_list_allows() -> None:
    allowed = hosts("pypi.org", "*.example.org:8443", "1.2.3.4:22")
    assert allowed.allows("pypi.org", 443)
    assert allowed.allows("pypi.org", 80)
    assert allowed.allows("a.b.example.org", 8443)
    assert allowed.allows("1.2.3.4", 22)
    for host, port in [
        ("pypi.org", 22),
        ("xpypi.org", 443),
        ("pypi.org.evil.test", 443),
        ("example.org", 8443),
        ("a.example.org", 443),
        ("1.2.3.4", 80),
    ]:
        assert not allowed.allows(host, port), (host, port)


@pytest.mark.parametrize("pattern", ["*", "*.org", "a.*", "*.1.2.3.4", "http://a", "0x7f000001", ""])
def test_a_bad_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError):
        hosts(pattern)


def test_a_policy_reads_as_it_is_written() -> None:
    adapter: TypeAdapter[Network] = TypeAdapter(Network)
    assert adapter.validate_python({"allow": ["pypi.org"]}) == hosts("pypi.org")
    assert adapter.validate_json('"full"') == "full"
    for wrong in ('"some"', '{"allow": []}', '{"deny": []}'):
        with pytest.raises(ValidationError):
            adapter.validate_json(wrong)


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "::1", "::"),
        *("169.254.169.254", "169.254.0.1", "fe80::1", "fe80::1%2", "fec0::1"),
        *("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"),
        *("224.0.0.1", "239.1.1.1", "ff02::1", "255.255.255.255", "240.0.0.1"),
        *("::ffff:127.0.0.1", "::ffff:93.184.216.34", "::ffff:0:7f00:1", "::127.0.0.1"),
        *("2002:7f00:1::", "2002:a9fe:a9fe::1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2001:0:1::1"),
        *("not an address", ""),
    ],
)
def test_what_is_never_open(address: str) -> None:
    everything = [ip_network("0.0.0.0/0"), ip_network("::/0")]
    assert AddressRules(reach=everything, own=lambda address: False).fault(address) is not None


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "172.31.0.1", "192.168.1.1", "100.64.0.1", "fd12::1", "198.18.0.1"]
)
def test_what_is_open_where_the_operator_says_so(address: str) -> None:
    def own(address: object) -> bool:
        return False

    assert AddressRules(own=own).fault(address) is not None
    whole = ip_network(f"{address}/{ip_address(address).max_prefixlen}")
    assert AddressRules(reach=[whole], own=own).fault(address) is None
    assert AddressRules(reach=[whole], deny=[whole], own=own).fault(address) is not None
    assert AddressRules(reach=[whole], own=lambda address: True).fault(address) == "this machine"


def test_the_public_network_is_open() -> None:
    for address in (SITE, OTHER_SITE, "2606:2800:220:1::1"):
        assert AddressRules(own=lambda address: False).fault(address) is None


def test_an_address_of_this_machine_is_known() -> None:
    assert is_own(ip_address("127.0.0.1"))
    assert not is_own(ip_address(SITE))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((SITE, 9))
        except OSError:
            pytest.skip("this machine has no address but its loopback one")
        assert is_own(ip_address(probe.getsockname()[0]))


# -- who is let through -----------------------------------------------------------------------------


async def test_a_plain_request_arrives_as_it_is_meant() -> None:
    async with way(hosts("site.test")) as to:
        request = (
            b"POST http://SITE.test./a?b HTTP/1.1\r\nHost: site.test\r\nX-Own: yes\r\nConnection: x-gone\r\n"
            b"X-Gone: 1\r\nProxy-Authorization: secret\r\nContent-Length: 4\r\n\r\nbody"
        )
        answer = await to.ask(request)
        assert answer.endswith(f"this is {SITE}:80\n".encode())
        (received,) = to.net.received.values()
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.split(b"\r\n") == [
            b"POST /a?b HTTP/1.1",
            b"Host: SITE.test.",
            b"x-own: yes",
            b"Content-Length: 4",
            b"Connection: close",
        ]
        assert body == b"body"
        assert to.log == ["network: site.test:80 allowed"]
    assert to.log[1].startswith("network: 1 connections allowed, 0 refused, ")


async def test_a_chunked_body_is_framed_anew() -> None:
    async with way() as to:
        head = b"POST http://site.test/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        await to.ask(head + b"2\r\nab\r\n3;ext=1\r\ncde\r\n0\r\nTrailer: x\r\n\r\n")
        (received,) = to.net.received.values()
        body = received.partition(b"\r\n\r\n")[2]
        assert body.endswith(b"0\r\n\r\n")
        assert b"ext" not in received
        assert b"railer" not in received
        assert b"ab" in body
        assert b"cde" in body


async def test_a_tunnel_goes_both_ways() -> None:
    async with way(hosts("site.test")) as to:
        answer = await to.ask(b"CONNECT site.test:443 HTTP/1.1\r\nHost: x\r\n\r\n", then=b"\1\2hello\r\n\r\n")
        assert answer.endswith(f"this is {SITE}:443\n".encode())
        assert to.net.received == {(SITE, 443): b"\1\2hello\r\n\r\n"}


async def test_what_comes_with_the_head_of_a_tunnel_is_not_lost() -> None:
    async with way() as to:
        await to.ask(b"CONNECT site.test:443 HTTP/1.1\r\n\r\nearly\r\n\r\n")
        assert to.net.received == {(SITE, 443): b"early\r\n\r\n"}


async def test_who_is_not_on_the_list_is_not_looked_up() -> None:
    async with way(hosts("site.test")) as to:
        for target in ("other.test:443", "site.test:22", f"{SITE}:443", "localhost:443"):
            answer = await to.connect(target)
            assert answer.startswith(b"HTTP/1.1 403 "), target
            assert b"the task's network does not allow this host and port" in answer
        assert to.net.asked == []
        assert len([line for line in to.log if "refused" in line]) == 4


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.1.1", "10.9.9.9", "169.254.169.254", "::1", "64:ff9b::7f00:1"]
)
async def test_a_name_is_refused_for_any_of_its_addresses(address: str) -> None:
    async with way(names={"mixed.test": [[SITE, address]]}) as to:
        answer = await to.connect("mixed.test:443")
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert address.encode() in answer
        assert to.net.received == {}


async def test_a_name_is_looked_up_once_and_what_was_checked_is_connected_to() -> None:
    async with way(names={"turns.test": [[SITE], ["127.0.0.1"]]}) as to:
        assert (await to.get("http://turns.test/")).endswith(f"this is {SITE}:80\n".encode())
        assert to.net.asked == ["turns.test"]
        assert (await to.get("http://turns.test/")).startswith(b"HTTP/1.1 403 ")
        assert set(to.net.received) == {(SITE, 80)}


async def test_the_operator_opens_and_closes_networks() -> None:
    async with way(reach="10.0.0.0/8", deny="151.101.0.0/16") as to:
        assert b"10.1.2.3:80" in await to.get("http://inner.test/")
        assert (await to.get("http://other.test/")).startswith(b"HTTP/1.1 403 ")
        assert (await to.get("http://10.9.9.9:8700/")).startswith(b"HTTP/1.1 403 ")


# -- what is no request -------------------------------------------------------------------------------

MALFORMED = [
    b"GET / HTTP/1.1\r\nHost: site.test\r\n\r\n",
    b"GET https://site.test/ HTTP/1.1\r\n\r\n",
    b"GET http://other.test@site.test/ HTTP/1.1\r\n\r\n",
    b"GET http://site.test\\@other.test/ HTTP/1.1\r\n\r\n",
    b"GET http://2130706433/ HTTP/1.1\r\n\r\n",
    b"GET http://0x7f.1/ HTTP/1.1\r\n\r\n",
    b"GET http://site.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n",
    b"GET http://site.test/ HTTP/1.1\r\nHost: site.test:8080\r\n\r\n",
    b"GET http://site.test/ HTTP/1.1\r\nHost: site.test\r\nHost: site.test\r\n\r\n",
    b"GET http://site.test/ HTTP/1.1\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    b"POST http://site.test/ HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST http://site.test/ HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nbody",
    b"POST http://site.test/ HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"GET http://site.test/ HTTP/1.1\r\nX: a\rY: b\r\n\r\n",
    b"GET http://site.test/\x01 HTTP/1.1\r\n\r\n",
    b"CONNECT site.test HTTP/1.1\r\n\r\n",
    b"CONNECT 0x7f000001:443 HTTP/1.1\r\n\r\n",
    b"CONNECT http://site.test:443 HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01 not HTTP\r\n\r\n",
]


@pytest.mark.parametrize("request_bytes", MALFORMED)
async def test_what_could_be_read_in_two_ways_is_refused(request_bytes: bytes) -> None:
    async with way() as to:
        answer = await to.ask(request_bytes)
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert to.net.received == {}
        assert to.log == []


async def test_a_second_request_on_the_connection_goes_nowhere() -> None:
    async with way() as to:
        second = b"GET http://other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n"
        await to.ask(b"GET http://site.test/ HTTP/1.1\r\n\r\n" + second)
        await to.ask(b"POST http://site.test/ HTTP/1.1\r\nContent-Length: 2\r\n\r\nab" + second)
        assert set(to.net.received) == {(SITE, 80)}
        assert b"other.test" not in to.net.received[SITE, 80]


# -- bounds ---------------------------------------------------------------------------------------------


async def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    async with way(head_s=0.1) as to:
        assert (await to.ask(b"GET http://site.test/ HTTP/1.1\r\nX: ")).startswith(b"HTTP/1.1 408 ")


async def test_a_head_has_a_size() -> None:
    async with way(head_bytes=1000) as to:
        answer = await to.ask(b"GET http://site.test/ HTTP/1.1\r\nX: " + b"x" * 2000)
        assert answer.startswith(b"HTTP/1.1 431 ")


async def test_connections_at_once_are_bounded() -> None:
    async with way(connections=2) as to:
        to.net.answers = False
        open_ones = [await asyncio.open_connection("127.0.0.1", to.port) for _ in range(2)]
        for reader, writer in open_ones:
            writer.write(b"CONNECT site.test:443 HTTP/1.1\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await to.connect("site.test:443")).startswith(b"HTTP/1.1 503 ")
        for _, writer in open_ones:
            writer.transport.abort()


async def test_connections_take_so_many_descriptors() -> None:
    async with way(connections=2) as to:
        before = open_descriptors()
        opened = [await asyncio.open_connection("127.0.0.1", to.port) for _ in range(100)]
        for reader, _ in opened[2 + TOLD :]:
            async with asyncio.timeout(20):
                assert await _end_of(reader)
        assert open_descriptors() - before <= len(opened) + 2 + TOLD
        for _, writer in opened:
            writer.transport.abort()


async def _end_of(reader: asyncio.StreamReader) -> bool:
    """Whether it ended, with or without a word before."""
    try:
        await reader.read()
    except ConnectionResetError:
        pass
    return True


async def test_an_answer_before_the_end_of_the_request_is_the_end() -> None:
    async with way() as to:
        head = b"POST http://site.test/ HTTP/1.1\r\nContent-Length: 1000\r\n\r\n"
        assert (await to.ask(head + b"not all of it")).endswith(f"this is {SITE}:80\n".encode())


async def test_bytes_are_bounded_over_all_connections() -> None:
    async with way(total_bytes=100_000) as to:
        to.net.answers = False
        body = b"x" * 200_000
        head = b"POST http://site.test/ HTTP/1.1\r\nContent-Length: 200000\r\n\r\n"
        with pytest.raises(OSError):
            assert await to.ask(head + body) == b""
            raise ConnectionResetError
        assert len(to.net.received[SITE, 80]) <= 100_000
        assert (await to.get("http://site.test/")).startswith(b"HTTP/1.1 403 ")


async def test_silence_ends_a_connection() -> None:
    async with way(idle_s=0.1) as to:
        to.net.answers = False
        with pytest.raises(OSError):
            answer = await to.ask(b"CONNECT site.test:443 HTTP/1.1\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            raise ConnectionResetError


async def test_a_host_that_does_not_answer_is_given_up() -> None:
    async with way(names={"none.test": [[]]}) as to:
        assert (await to.connect("none.test:443")).startswith(b"HTTP/1.1 502 ")
        assert to.log == ["network: none.test:443 failed: can't be reached"]


async def test_look_ups_that_hang_are_few_and_given_up() -> None:
    names = {f"n{number}.test": [[SITE]] for number in range(12)}
    async with way(connect_s=0.2, names=names) as to:
        to.net.resolves.clear()
        answers = await asyncio.gather(*(to.connect(f"{name}:443") for name in names))
        assert all(answer.startswith(b"HTTP/1.1 504 ") for answer in answers)
        assert len(to.net.asked) == LOOK_UPS
        to.net.resolves.set()


async def test_the_log_is_not_filled() -> None:
    async with way(hosts("site.test")) as to:
        for number in range(300):
            await to.connect(f"n{number}.test:443")
        assert len(to.log) == 201
    assert "300 refused" in to.log[-1]


async def test_leaving_ends_what_is_open() -> None:
    async with way() as to:
        to.net.answers = False
        reader, writer = await asyncio.open_connection("127.0.0.1", to.port)
        writer.write(b"CONNECT site.test:443 HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    with pytest.raises(OSError):
        assert await reader.read() == b""
        raise ConnectionResetError
    writer.close()


async def test_a_socket_that_is_shut_is_left_alone() -> None:
    net = FakeInternet(NAMES)
    egress = Egress(rules=AddressRules(), internet=net.internet)
    sock = socket.create_server(("127.0.0.1", 0))
    async with egress.serve("full", sock, log=lambda line: None):
        await asyncio.sleep(0)
        (accepting,) = (task for task in asyncio.all_tasks() if task.get_name() == "egress-accept")
        sock.shutdown(socket.SHUT_RDWR)
        async with asyncio.timeout(20):
            await accepting


async def test_the_environment_names_the_proxy() -> None:
    async with way() as to:
        assert to.env["https_proxy"] == to.env["HTTP_PROXY"] == f"http://127.0.0.1:{to.port}"
        assert "127.0.0.1" in to.env["NO_PROXY"]
