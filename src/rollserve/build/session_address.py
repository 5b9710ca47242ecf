"""The address at which sandboxes elsewhere reach their session, from the settings, checked.

Each worker has a listener of its own for it, which serves sessions and nothing else, on the first free port
of a range; its sandboxes are given the advertised URL with that port.
"""

from __future__ import annotations

import errno
import socket
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from rollserve.build.http import is_loopback, listening
from rollserve.build.tls import check_trust, read_authority, server_context
from rollserve.config import SessionAddressSettings, Settings
from rollserve.errors import ConfigError

SECTION = "session_address"
PORT = "{port}"
_FREE_PORTS = (1, 65535)


@dataclass(frozen=True, kw_only=True)
class SessionAddresses:
    """Those of a server's workers. ``url`` has ``{port}`` in it, ``tls`` is None where plain HTTP is spoken,
    ``authority`` (PEM) is empty where sandboxes trust the certificate anyway."""

    url: str
    host: str
    ports: range
    tls: ssl.SSLContext | None = None
    authority: bytes = b""

    def at(self, port: int) -> str:
        return self.url.replace(PORT, str(port))

    def take_port(self) -> socket.socket:
        """A listening socket on the first port that is free. Raises ``ConfigError``."""
        for port in self.ports:
            if (sock := self._listening(port)) is not None:
                return sock
        raise _in_use(self, 0, 1)

    def check_free(self, wanted: int) -> None:
        """Raises ``ConfigError`` where fewer ports are free. Whoever is quicker may still take them."""
        found = 0
        for port in self.ports:
            if (sock := self._listening(port)) is not None:
                sock.close()
                found += 1
            if found == wanted:
                return
        raise _in_use(self, found, wanted)

    def _listening(self, port: int) -> socket.socket | None:
        try:
            return listening(self.host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise ConfigError(
                f"can't listen on {self.host}:{port}: {error.strerror or error}",
                field=f"{SECTION}.{'ports' if error.errno == errno.EACCES else 'host'}",
            ) from error


def read_session_addresses(settings: Settings) -> SessionAddresses | None:
    """None where none is advertised. Blocking: reads the files. Raises ``ConfigError``."""
    told = settings.session_address
    if told.url is None:
        fields = type(told).model_fields
        if said := [name for name in fields if getattr(told, name) != fields[name].default]:
            raise _fault("url", f"is not set, and {said[0]} is: sandboxes must be told where to go")
        return None
    ports = _ports(told, settings)
    first = _check_url(told.url, ports)
    tls = _tls(told)
    _check_plain(told, first, tls)
    _check_policy(settings)
    authority = b""
    if told.ca_file is not None:
        authority = read_authority(told.ca_file, field=f"{SECTION}.ca_file")
        if tls is not None:
            check_trust(tls, told.ca_file, first.hostname or "", field=f"{SECTION}.ca_file")
    url = told.url.rstrip("/")
    return SessionAddresses(url=url, host=told.host, ports=ports, tls=tls, authority=authority)


def check_session_address(settings: Settings) -> None:
    """Before anything is started. Blocking. Raises ``ConfigError``."""
    addresses = read_session_addresses(settings)
    if addresses is not None:
        addresses.check_free(settings.workers.count)


def opening(settings: Settings) -> tuple[str, int, int] | None:
    """Address, first and last port of what is advertised, for a network policy; None without a URL, or where
    it names its host. Of settings that were checked."""
    told = settings.session_address
    if told.url is None:
        return None
    ports = _ports(told, settings)
    ends = [urlsplit(told.url.replace(PORT, str(port))) for port in (ports[0], ports[-1])]
    if PORT in told.url.partition("//")[2].rpartition(":")[0] or not _is_address(ends[0].hostname or ""):
        return None
    first, last = (end.port or (443 if end.scheme == "https" else 80) for end in ends)
    return ends[0].hostname or "", first, last


def _ports(told: SessionAddressSettings, settings: Settings) -> range:
    first, _, last = told.ports.partition("-")
    ports = range(int(first), int(last or first) + 1)
    least, most = _FREE_PORTS
    if not ports or ports[0] < least or ports[-1] > most:
        raise _fault("ports", f"{told.ports!r} is no range of ports", hint="FIRST-LAST, as 8800-8899")
    if len(ports) < settings.workers.count:
        raise _fault(
            "ports", f"{told.ports} are {len(ports)}, and {settings.workers.count} workers need one each"
        )
    if settings.api.port in ports:
        raise _fault("ports", f"{told.ports} hold {settings.api.port}, the control API's (api.port)")
    return ports


def _check_url(url: str, ports: range) -> SplitResult:
    """The URL of the first port."""
    sample = url.replace(PORT, str(ports[0]))
    hint = "as https://10.0.0.5:{port}"
    if "{" in sample or "}" in sample:
        raise _fault("url", "has something other than {port} in braces", hint=hint)
    try:
        parts = urlsplit(sample)
        _ = parts.port  # it raises for what is none
    except ValueError as error:
        raise _fault("url", f"is no URL: {error}", hint=hint) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _fault("url", f"{url!r} is no https address", hint=hint)
    if "@" in parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise _fault("url", "has more than scheme, host and port", hint=hint)
    if len(ports) > 1 and PORT not in url:
        raise _fault("url", "is one for all workers, and each has a port of its own", hint=hint)
    return parts


def _tls(told: SessionAddressSettings) -> ssl.SSLContext | None:
    if told.certificate_file is None:
        if told.key_file is not None:
            raise _fault("certificate_file", "is not set, and key_file is")
        return None
    return server_context(told.certificate_file, told.key_file or told.certificate_file, section=SECTION)


def _check_plain(told: SessionAddressSettings, url: SplitResult, tls: ssl.SSLContext | None) -> None:
    if url.scheme == "http":
        if tls is not None:
            raise _fault("url", "says http, and the listener has a certificate", hint="make it https")
        if not told.allow_plain and not is_loopback(url.hostname or ""):
            raise _fault(
                "url",
                f"sends what {url.hostname} is told, secrets too, over the network in plain text",
                hint="make it https, with certificate_file and key_file, or accept it with allow_plain",
            )
    if tls is None and not told.allow_plain and not is_loopback(told.host):
        raise _fault(
            "certificate_file",
            f"is not set, so that the listener on {told.host} speaks plain HTTP",
            hint="give certificate_file and key_file; listen on 127.0.0.1 (host) where a proxy of yours ends "
            "TLS, or all is on this machine; or accept it with allow_plain",
        )


def _check_policy(settings: Settings) -> None:
    offered = {settings.workers.runtime, *settings.workers.runtimes}
    if "kubernetes" in offered and settings.kubernetes.network_policy and opening(settings) is None:
        raise _fault(
            "url",
            "names its host, and pods under our network policy have no DNS",
            hint="give an address of the network (https://10.0.0.5:{port}), or set kubernetes.network_policy "
            "to false and have a policy of your own",
        )


def _is_address(host: str) -> bool:
    try:
        return not getattr(ip_address(host), "scope_id", None)
    except ValueError:
        return False


def _in_use(addresses: SessionAddresses, free: int, wanted: int) -> ConfigError:
    ports = addresses.ports
    return _fault(
        "ports",
        f"of {ports[0]}-{ports[-1]} on {addresses.host} {free} are free, and {wanted} needed: one a worker",
        hint="end what uses them, or name another range, with a few to spare for workers that are replaced",
    )


def _fault(field: str, message: str, *, hint: str | None = None) -> ConfigError:
    return ConfigError(message, field=f"{SECTION}.{field}", hint=hint)
