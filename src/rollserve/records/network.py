"""Where a task's sandbox may connect to: nothing, named hosts, or any host of the public network."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from rollserve.records.base import Record

WEB_PORTS = (80, 443)
"""Of an allowed host that names no port."""

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)")
_NAME_CHARS = 253


def split_host(text: str) -> tuple[str, int | None]:
    """``name:port``, ``1.2.3.4:port`` or ``[::1]:port``, the port left out or not: the host in its one
    spelling (lower case, no dot at the end, no brackets) and the port. Raises ``ValueError`` for all that
    another reader might take for another host: addresses in hexadecimal, octal or as one number among it."""
    if text.startswith("["):
        inner, closing, rest = text[1:].partition("]")
        if not closing or "%" in inner:
            raise ValueError(f"{text!r} is no address")
        return str(IPv6Address(inner)), _port(rest)
    host, colon, port = text.partition(":")
    return _plain_host(host), _port(colon + port)


def _port(text: str) -> int | None:
    if not text:
        return None
    digits = text[1:]
    if text[0] != ":" or not digits.isascii() or not digits.isdigit() or not 0 < int(digits[:9]) < 65536:
        raise ValueError(f"{text!r} is no port")
    return int(digits[:9])


def _plain_host(text: str) -> str:
    host = text.lower().removesuffix(".")
    if not host.isascii() or len(host) > _NAME_CHARS or not _NAME.fullmatch(host):
        raise ValueError(f"{text!r} is no host name")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        return str(IPv4Address(host))
    return host


def _checked_pattern(text: str) -> str:
    below = text.removeprefix("*.")
    host, _ = split_host(below)
    if below != text and (_is_address(host) or "." not in host):
        raise ValueError(f"{text!r}: '*.' stands for what is below a domain of at least two parts")
    return text


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


HostPattern = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_checked_pattern)]
"""``name``, ``*.name`` (all below it, not itself) or an address; ``:port`` for one other than 80 and 443."""


class AllowedHosts(Record):
    """The hosts that may be connected to."""

    allow: Annotated[list[HostPattern], Field(min_length=1, max_length=256)]

    def allows(self, host: str, port: int) -> bool:
        """``host`` as ``split_host`` spells it."""
        return any(_matches(pattern, host, port) for pattern in self.allow)


def _matches(pattern: str, host: str, port: int) -> bool:
    name, wanted = split_host(pattern.removeprefix("*."))
    if port not in (WEB_PORTS if wanted is None else (wanted,)):
        return False
    return host.endswith(f".{name}") if pattern.startswith("*.") else host == name


Network: TypeAlias = Literal["none", "full"] | AllowedHosts
