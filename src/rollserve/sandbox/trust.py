"""A private authority, made known to the programs of a sandbox."""

from __future__ import annotations

from dataclasses import dataclass

from rollserve.errors import SandboxError
from rollserve.sandbox.base import Sandbox, exports

WITHIN_S = 60.0

_SYSTEMS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True)
class Trusted:
    """Files of a sandbox: the ``authority``, and a ``bundle`` with all that it trusts."""

    authority: str
    bundle: str

    @property
    def env(self) -> dict[str, str]:
        """The first two take the place of what programs trust otherwise, the third is added to it."""
        return {
            "SSL_CERT_FILE": self.bundle,
            "REQUESTS_CA_BUNDLE": self.bundle,
            "NODE_EXTRA_CA_CERTS": self.authority,
        }

    def script(self) -> str:
        """What is trusted already stays so."""
        return f"""if (for f in "$SSL_CERT_FILE" {" ".join(_SYSTEMS)}; do [ ! -f "$f" ] || break; done
if [ -f "$f" ]; then cat {self.authority} "$f"; else cat {self.authority}; fi >{self.bundle}); then
{exports(self.env)}
else false; fi"""


def trusted_in(sandbox: Sandbox) -> Trusted:
    folder = f"/tmp/.trust-{sandbox.id}"
    return Trusted(f"{folder}/authority.pem", f"{folder}/bundle.pem")


async def trust(sandbox: Sandbox, authority: bytes) -> None:
    """Have programs that are started from now on trust ``authority`` (PEM) beside what they do. Once a
    sandbox. Raises ``SandboxError``."""
    files = trusted_in(sandbox)
    await sandbox.write_file(files.authority, authority.rstrip(b"\n") + b"\n")
    done = await sandbox.exec(files.script(), timeout_s=WITHIN_S)
    if done.exit_code != 0:
        raise SandboxError(
            f"the authority of the session's address was not placed: {done.output[-500:]}",
            operation="sandbox.trust",
        )
