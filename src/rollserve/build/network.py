"""The network of sandboxes: what tasks may ask for here, and the way out of those that do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network, ip_network

from rollserve.config import Settings
from rollserve.errors import ConfigError, InvalidInput
from rollserve.records.network import AllowedHosts, Network
from rollserve.sandbox.base import RuntimeReport
from rollserve.sandbox.egress.addresses import PRIVATE, AddressRules, Range
from rollserve.sandbox.egress.proxy import Egress, EgressBounds


def make_egress(settings: Settings) -> Egress:
    """Blocking: the API's address may be a name. Raises ``ConfigError``."""
    network = settings.network
    check_reach(settings)
    return Egress(
        rules=AddressRules(reach=network.reach, deny=(*network.deny, *_api_addresses(settings))),
        bounds=EgressBounds(connections=network.connections, total_bytes=network.max_mb << 20),
    )


def check_reach(settings: Settings) -> None:
    """What is never open can't be opened. Raises ``ConfigError``."""
    for wanted in settings.network.reach:
        if not any(_is_part(wanted, private) for private in PRIVATE):
            raise ConfigError(
                f"{wanted} is no private network", field="network.reach", hint=", ".join(map(str, PRIVATE))
            )


def _is_part(wanted: Range, private: Range) -> bool:
    if isinstance(wanted, IPv4Network):
        return isinstance(private, IPv4Network) and wanted.subnet_of(private)
    return isinstance(private, IPv6Network) and wanted.subnet_of(private)


def _api_addresses(settings: Settings) -> Iterator[Range]:
    """Where the control API listens. A worker of the same machine knows that address as its own."""
    try:
        found = socket.getaddrinfo(settings.api.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return  # a name that is not known here leads nowhere
    for entry in found:
        yield ip_network(str(entry[4][0]).partition("%")[0])


def check_network(network: Network, report: RuntimeReport, *, may_ask: str) -> None:
    """Raises ``InvalidInput`` (field ``network``) for what this server, or the runtime, does not give."""
    if network == "none":
        return
    asked = "hosts" if isinstance(network, AllowedHosts) else "full"
    if may_ask == "none":
        raise InvalidInput(
            "sandboxes have no network on this server",
            field="network",
            hint="the operator's setting network.tasks_may_ask allows it: hosts, or full",
        )
    if asked == "full" and may_ask != "full":
        raise InvalidInput(
            "tasks may reach hosts that they name on this server, not all",
            field="network",
            hint='give {"allow": [...]}, or have the operator set network.tasks_may_ask to full',
        )
    if not report.isolated or "listen" not in report.can:
        raise InvalidInput(
            f"the runtime {report.name!r} can't keep a sandbox to a network",
            field="network",
            hint="bubblewrap can",
        )
