"""Authorities and certificates for tests: made anew, valid for an hour, in files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Signed:
    """A certificate and its key, in files."""

    certificate: Path
    key: Path


class Authority:
    """One of its own, which nobody trusts who was not told to; ``file`` is its certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = (
            _builder(self._name, self._name, self._key.public_key(), HOUR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(*_USES), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(made.public_bytes(Encoding.PEM))

    def sign(
        self,
        host: str = "127.0.0.1",
        *,
        name: str = "server",
        lasts: timedelta = HOUR,
        password: bytes | None = None,
    ) -> Signed:
        """For one host, an address or a name; ``lasts`` below zero has run out."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = (
            _builder(_name(name), self._name, key.public_key(), lasts)
            .add_extension(x509.SubjectAlternativeName([_alternative(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        signed = Signed(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        signed.certificate.write_bytes(made.public_bytes(Encoding.PEM))
        kept = BestAvailableEncryption(password) if password else NoEncryption()
        signed.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, kept))
        return signed


_USES = (True, False, False, False, False, True, True, False, False)
"""Signing: itself, certificates and lists of those that are called back."""


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"rollserve test {text}")])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lasts: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * HOUR)
        .not_valid_after(now + lasts)
    )
