"""Which addresses may be connected to, whatever name led to them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Range: TypeAlias = IPv4Network | IPv6Network

PRIVATE = tuple(
    map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"))
)
"""What the operator may open."""

_NEVER = tuple(
    (ip_network(text), what)
    for text, what in (
        ("0.0.0.0/8", "this machine"),
        ("127.0.0.0/8", "loopback"),
        ("::1/128", "loopback"),
        ("::/128", "this machine"),
        ("169.254.0.0/16", "link-local, metadata"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("168.63.129.16/32", "metadata"),
        ("100.100.100.200/32", "metadata"),
        ("192.0.0.0/24", "metadata"),
        ("fd00:ec2::/32", "metadata"),
        ("fd20:ce::/32", "metadata"),
        ("224.0.0.0/4", "multicast"),
        ("ff00::/8", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/96", "an IPv4 address inside an IPv6 one"),
        ("::ffff:0:0/96", "an IPv4 address inside an IPv6 one"),
        ("::ffff:0:0:0/96", "an IPv4 address inside an IPv6 one"),
        ("64:ff9b::/96", "an IPv4 address inside an IPv6 one"),
        ("64:ff9b:1::/48", "an IPv4 address inside an IPv6 one"),
        ("2002::/16", "an IPv4 address inside an IPv6 one"),
        ("2001::/32", "an IPv4 address inside an IPv6 one"),
    )
)
_PROBE_PORT = 9


def is_own(address: Address) -> bool:
    """Whether the address is this machine's: it is then its own source. No packet is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), _PROBE_PORT))
            source = str(probe.getsockname()[0])
        except OSError:  # no way there, so no way here
            return False
    return source == str(address)


class AddressRules:
    """``reach`` are private networks that are open all the same, ``deny`` what is closed besides. What is
    never open (loopback, link-local, metadata, multicast, IPv4 inside IPv6, this machine's own addresses,
    where the control API may listen) ``reach`` does not open either."""

    def __init__(
        self,
        *,
        reach: Iterable[Range] = (),
        deny: Iterable[Range] = (),
        own: Callable[[Address], bool] = is_own,
    ) -> None:
        self._reach = tuple(reach)
        self._deny = tuple(deny)
        self._own = own

    def fault(self, text: str) -> str | None:
        """Why the address (as a resolver writes it) can't be connected to; None when it can."""
        try:
            address = ip_address(text.partition("%")[0])
        except ValueError:
            return "no address"
        for never, what in _NEVER:
            if _lies_in(address, never):
                return what
        if any(_lies_in(address, closed) for closed in self._deny):
            return "closed by the operator"
        if self._own(address):
            return "this machine"
        if address.is_global or any(_lies_in(address, opened) for opened in self._reach):
            return None
        return "a private or reserved network"


def _lies_in(address: Address, network: Range) -> bool:
    return address.version == network.version and address in network
