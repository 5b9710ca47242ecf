"""Attacks on the proxy that lets a sandbox out: from a real sandbox, over an internet made up for it."""

from __future__ import annotations

from rollserve.testing.attack_scene import (
    ALLOWED_PLACES,
    COMMAND_S,
    PROXY_BOUNDS,
    THROUGH,
    Scene,
    Try,
    connect,
)
from rollserve.testing.fake_internet import SITE

ADDRESSES = "every address that a name has is checked, whatever led to it"
ONE_SPELLING = "a host has one spelling; an address of another is none"
PINNED = "a name is looked up once a connection, and what was checked is connected to"
STRICT = "a request is read strictly and written anew; a connection is for one request"
LISTED = "only the hosts of the list, on the ports 80 and 443 unless it names another"


async def _says(scene: Scene, port: int, request: bytes) -> str:
    """What a proxy of the sandbox ``online`` answers there."""
    code = (
        f'use Socket; socket(S, 2, 1, 0); connect(S, sockaddr_in({port}, inet_aton("127.0.0.1"))) or exit; '
        f'alarm 20; $r = pack("H*", "{request.hex()}"); syswrite(S, $r); print while <S>'
    )
    return (await scene.online.exec(f"perl -e '{code}'", timeout_s=COMMAND_S)).output


def _got_out(scene: Scene, said: str) -> bool:
    """To anywhere but where all may go."""
    return THROUGH in said.split() or any(place not in ALLOWED_PLACES for place in scene.net.received)


def asks(*requests: str, listed: bool = False) -> Try:
    """Each on a connection of its own; ``{port}`` is a port that listens on the host."""

    async def tries(scene: Scene) -> bool:
        for text in requests:
            request = text.replace("{port}", str(scene.port)).encode()
            if _got_out(scene, await _says(scene, scene.listed if listed else scene.proxy, request)):
                return True
        return False

    return tries


def gets(*urls: str, listed: bool = False) -> Try:
    return asks(*(f"GET {url} HTTP/1.1\r\n\r\n" for url in urls), listed=listed)


def tunnels(*targets: str, listed: bool = False) -> Try:
    return asks(*(f"CONNECT {target} HTTP/1.1\r\n\r\n" for target in targets), listed=listed)


async def goes_around(scene: Scene) -> bool:
    there = f'sockaddr_in(443, inet_aton("{SITE}"))'
    code = f'use Socket; socket(S, 2, 1, 0); alarm 2; connect(S, {there}) and print "{THROUGH}"'
    result = await scene.online.exec(f"perl -e '{code}'", timeout_s=COMMAND_S)
    return result.output == THROUGH


async def others_proxy(scene: Scene) -> bool:
    return await connect("127.0.0.1", scene.proxy)(scene)


async def slow_head(scene: Scene) -> bool:
    """A connection whose request does not come to an end."""
    return " 408 " not in await _says(scene, scene.proxy, b"GET http://allowed.test/ HTTP/1.1\r\nX: ")


async def many_connections(scene: Scene) -> bool:
    """More tunnels at once than there are places."""
    scene.net.answers = False
    most = PROXY_BOUNDS.connections
    code = (
        f"use Socket; for (1 .. {most + 8}) {{ socket(my $s, 2, 1, 0); "
        f'connect($s, sockaddr_in({scene.proxy}, inet_aton("127.0.0.1"))) or next; '
        'syswrite($s, "CONNECT allowed.test:443 HTTP/1.1\\r\\n\\r\\n"); sysread($s, $r, 12); '
        "$n++ if $r =~ / 200/; push @all, $s } print $n"
    )
    result = await scene.online.exec(f"perl -e '{code}'", timeout_s=COMMAND_S)
    return int(result.output or 0) > most


async def big_body(scene: Scene) -> bool:
    """More bytes than the sandbox may send."""
    scene.net.answers = False
    size = 4 * PROXY_BOUNDS.total_bytes
    code = (
        f'use Socket; socket(S, 2, 1, 0); connect(S, sockaddr_in({scene.proxy}, inet_aton("127.0.0.1"))); '
        f'syswrite(S, "POST http://allowed.test/ HTTP/1.1\\r\\nContent-Length: {size}\\r\\n\\r\\n"); '
        f'$SIG{{PIPE}} = "IGNORE"; for (1 .. {size >> 16}) {{ syswrite(S, "x" x 65536) or last }}'
    )
    await scene.online.exec(f"perl -e '{code}'", timeout_s=COMMAND_S)
    return sum(map(len, scene.net.received.values())) > PROXY_BOUNDS.total_bytes


async def fronts(scene: Scene) -> bool:
    """What is said inside a tunnel is between its two ends."""
    request = b"CONNECT allowed.test:80 HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n"
    await _says(scene, scene.listed, request)
    return b"Host: other.test" in scene.net.received[SITE, 80]


PROXY: tuple[tuple[str, Try, str], ...] = (
    ("go around the proxy", goes_around, "no network but the proxy on the sandbox's own loopback address"),
    (
        "reach another sandbox's proxy",
        others_proxy,
        "it listens in that sandbox's network namespace",
    ),
    (
        "reach metadata addresses, by address and by name",
        gets(
            *("http://169.254.169.254/", "http://metadata.test/", "http://[fd00:ec2::254]/"),
            *("http://168.63.129.16/", "http://100.100.100.200/", "http://192.0.0.192/"),
        ),
        ADDRESSES,
    ),
    (
        "reach the control API by address and by name",
        gets(
            "http://127.0.0.1:{port}/",
            "http://[::1]:{port}/",
            "http://api.test:{port}/",
            "http://0.0.0.0:{port}/",
        ),
        f"{ADDRESSES}; this machine's own are closed",
    ),
    (
        "reach private networks",
        tunnels("10.0.0.1:443", "172.16.0.1:443", "192.168.0.1:443", "100.64.0.1:443", "[fd12::1]:443"),
        f"{ADDRESSES}; the operator may open some",
    ),
    (
        "write an address in octal, in hexadecimal, short, or as one number",
        gets(
            *("http://0177.0.0.1/", "http://0x7f.0.0.1/", "http://0x7f000001/", "http://127.1/"),
            *("http://2130706433/", "http://017700000001/", "http://127.0.0.1./", "http://0/"),
        ),
        ONE_SPELLING,
    ),
    (
        "hide an IPv4 address in an IPv6 one",
        gets(
            *("http://[::ffff:127.0.0.1]/", "http://[::ffff:169.254.169.254]/", "http://[::127.0.0.1]/"),
            *("http://[64:ff9b::a9fe:a9fe]/", "http://[2002:7f00:1::]/"),
        ),
        ADDRESSES,
    ),
    ("rebind a name between look and use", gets(*["http://rebind.test/"] * 4), PINNED),
    ("a name with a public and a closed address", gets(*["http://mixed.test/"] * 2), ADDRESSES),
    (
        "reach a host that is not on the list, or looks like one that is",
        gets(
            *(
                "http://other.test/",
                "http://xallowed.test/",
                "http://allowed.test.other.test/",
                "http://site.test/",
            ),
            *("http://allowed.test@other.test/", "http://other.test\\@allowed.test/", f"http://{SITE}/"),
            listed=True,
        ),
        LISTED,
    ),
    (
        "reach SSH, mail or the API's port on a host of the list",
        tunnels("allowed.test:22", "allowed.test:25", "allowed.test:8700", listed=True),
        LISTED,
    ),
    (
        "name one host in the address and another in `Host`",
        asks("GET http://allowed.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n", listed=True),
        STRICT,
    ),
    (
        "smuggle a second request",
        asks(
            "POST http://allowed.test/ HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
            "0\r\n\r\nGET http://other.test/ HTTP/1.1\r\n\r\n",
            "GET http://allowed.test/ HTTP/1.1\r\n\r\n"
            "GET http://other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n",
            "GET http://allowed.test/ HTTP/1.1\r\nX: a\rHost: other.test\r\n\r\n",
            listed=True,
        ),
        STRICT,
    ),
    (
        "hold the proxy up with a request that never ends",
        slow_head,
        "a bound on the time of a request's head",
    ),
    ("take more connections than allowed", many_connections, "connections at once are bounded"),
    ("send more than allowed", big_body, "the bytes of a sandbox are bounded"),
)

PROXY_OPEN: tuple[tuple[str, Try, str], ...] = (
    (
        "inside a tunnel, reach another site of an allowed host's address",
        fronts,
        "what is said in a tunnel is between its ends; list no host that shares its addresses with strangers",
    ),
)
