"""One inference server has one address, however people write it: two would count its slots twice."""

from __future__ import annotations

import re

import yarl

from rollserve.errors import InvalidInput

_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[0-9a-z._~:%-]+", re.IGNORECASE)
"""As ``yarl`` encodes names of other letters, and addresses of IPv6 with their zone."""

_USERINFO = re.compile(r"^([^/]*//)?.*@")
_BEHIND = re.compile(r"([?#]).*")
"""Of both too much rather than too little: a password may have a slash in it, a query a key."""


def checked_root(url: str) -> str:
    """The root of an address that somebody gives. Raises ``InvalidInput`` (field ``url``) as ``root_of``
    does, and for what no root has: a query, a fragment, and a user or password, which would be shown to all
    who may see the backend."""
    root, parsed = root_of(url), yarl.URL(url.strip())
    if parsed.raw_user is not None or parsed.raw_password is not None:
        raise InvalidInput(
            f"{shown(url)!r} has a user or password in it, which everybody would see who sees the backend",
            field="url",
            hint="leave it out; a key that the server wants goes into api_key",
        )
    for what, there in (("query", "?" in url), ("fragment", "#" in url)):
        if there:
            hint = f"did you mean {root!r}?"
            raise InvalidInput(
                f"{shown(url)!r} has a {what}: a server's root has none", field="url", hint=hint
            )
    return root


def root_of(url: str) -> str:
    """The server's root in its normal form, whose root is itself: scheme and host in lower case, no port that
    goes without saying, no empty part and no dots in the path, and no slash, ``/v1``, query or fragment at
    the end. Nothing is looked up: ``localhost`` and ``127.0.0.1`` are two names. Raises ``InvalidInput``
    (field ``url``)."""
    try:
        parsed = yarl.URL(url.strip())
        scheme, host, port = parsed.scheme, parsed.raw_host, parsed.explicit_port
    except ValueError as error:
        raise InvalidInput(f"{shown(url)!r} is no address: {error}", field="url") from error
    if scheme not in _PORTS or not host or not _HOST.fullmatch(host):
        hint = f"did you mean 'http://{shown(url)}'?" if "://" not in url else None
        raise InvalidInput(f"{shown(url)!r} is no http:// or https:// address", field="url", hint=hint)
    named = parsed.raw_authority.rpartition("@")
    name = f"[{host}]" if ":" in host else host
    said = "" if port in (None, _PORTS[scheme]) else f":{port}"
    return f"{scheme}://{named[0]}{named[1]}{name}{said}{_path(parsed.raw_path)}"


def shown(url: str) -> str:
    """Without what may be secret, for messages: user and password, query and fragment."""
    return _BEHIND.sub(r"\1***", _USERINFO.sub(r"\1***@", url))


def _path(raw: str) -> str:
    parts: list[str] = []
    for part in raw.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    while parts and parts[-1] == "v1":
        parts.pop()
    return "".join(f"/{part}" for part in parts)
