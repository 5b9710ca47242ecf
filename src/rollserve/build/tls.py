"""Certificates, as far as the standard library knows them: read and tried before anything is started."""

from __future__ import annotations

import ssl
from pathlib import Path

from rollserve.errors import ConfigError

_LARGEST_BYTES = 1 << 20
_STEPS = 8
"""A handshake takes three or four from each end."""


def server_context(certificate: Path, key: Path, *, section: str) -> ssl.SSLContext:
    """What a server shows: a certificate with its chain, and its key, both PEM. Blocking. Raises
    ``ConfigError`` at ``section``'s ``certificate_file`` or ``key_file``."""
    _read_pem(certificate, "CERTIFICATE", field=f"{section}.certificate_file")
    _read_pem(key, "PRIVATE KEY", field=f"{section}.key_file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        raise ConfigError(
            f"{key} is encrypted, and nobody is asked for a password",
            field=f"{section}.key_file",
            hint="`openssl pkey -in FILE -out FILE` takes the password off; keep the file to this user",
        )

    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except ssl.SSLError as error:
        if (error.reason or "").endswith("_MISMATCH"):
            message = f"the key in {key} is not that of the certificate in {certificate}"
            raise ConfigError(message, field=f"{section}.key_file") from error
        raise ConfigError(
            f"{certificate} and {key} are no certificate and key in PEM: {error.reason or error}",
            field=f"{section}.certificate_file",
        ) from error
    return context


def read_authority(path: Path, *, field: str) -> bytes:
    """Certificates that are to be trusted (PEM). Blocking. Raises ``ConfigError``."""
    text = _read_pem(path, "CERTIFICATE", field=field)
    _trusting(text, path, field)
    return text


def check_trust(server: ssl.SSLContext, authority: Path, host: str, *, field: str) -> None:
    """Let a client that trusts ``authority``, and nothing else, meet the server under the name ``host``: in
    memory, no connection is made. Blocking. Raises ``ConfigError``."""
    client = _trusting(read_authority(authority, field=field), authority, field)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for _ in range(_STEPS):
            through = [_is_through(end) for end in ends]
            if all(through):
                return
        raise ConfigError(f"no connection by TLS comes about in {_STEPS} steps", field=field)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"who trusts {authority} does not trust the certificate for {host}: {error.verify_message}",
            field=field,
            hint="name the authority that signed it, and a certificate that is for this host and still valid",
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(
            f"no connection by TLS comes about: {error.reason or error}", field=field
        ) from error


def _is_through(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _trusting(authority: bytes, path: Path, field: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=authority.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{path} holds no certificates in PEM: {error}", field=field) from error


def _read_pem(path: Path, what: str, *, field: str) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}", field=field) from error
    if len(text) > _LARGEST_BYTES:
        raise ConfigError(f"{path} has more than {_LARGEST_BYTES} bytes", field=field)
    if f"{what}-----".encode() not in text:
        raise ConfigError(f"{path} holds no {what.lower()} in PEM", field=field)
    return text
