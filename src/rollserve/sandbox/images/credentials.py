"""Who one is to a registry, as Docker's configuration file says it."""

from __future__ import annotations

import base64
import binascii
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from rollserve.sandbox.images.base import bad_image
from rollserve.sandbox.images.reference import DEFAULT_REGISTRY

_HELPER_TIMEOUT_S = 30.0
_DEFAULT_KEYS = ("https://index.docker.io/v1/", DEFAULT_REGISTRY)


def credentials(file: Path | None, host: str) -> tuple[str, str] | None:
    """User and password for ``host``, None where the file has none. Raises ``SandboxError`` for a file that
    can't be read; no message holds a secret."""
    if file is None or not file.is_file():
        return None
    try:
        config = json.loads(file.read_bytes())
        keys = _DEFAULT_KEYS if host == DEFAULT_REGISTRY else (host, f"https://{host}", f"http://{host}")
        for key in keys:
            found = _of_key(config, key)
            if found is not None:
                return found
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise bad_image(f"{file} is no configuration of Docker's: {type(error).__name__}") from error
    return None


def _of_key(config: dict[str, Any], key: str) -> tuple[str, str] | None:
    helper = config.get("credHelpers", {}).get(key)
    entry = config.get("auths", {}).get(key)
    if helper is None and entry is not None and config.get("credsStore") and not entry.get("auth"):
        helper = config["credsStore"]
    if helper is not None:
        return _ask(str(helper), key)
    if entry is None:
        return None
    if "username" in entry:
        return str(entry["username"]), str(entry.get("password", ""))
    return _decoded(entry["auth"]) if entry.get("auth") else None


def _decoded(text: str) -> tuple[str, str]:
    try:
        user, _, password = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("auth") from error
    return user, password


def _ask(helper: str, key: str) -> tuple[str, str] | None:
    program = shutil.which(f"docker-credential-{helper}")
    if program is None:
        raise bad_image(f"docker-credential-{helper}, which Docker's configuration names, is not installed")
    try:
        done = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise bad_image(f"docker-credential-{helper} fails: {type(error).__name__}") from error
    if done.returncode != 0:
        return None
    answer = json.loads(done.stdout)
    return str(answer["Username"]), str(answer["Secret"])
