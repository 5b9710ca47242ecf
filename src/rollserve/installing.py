"""What to type for what is not installed. No index has rollserve, so ``pip install 'rollserve[…]'`` would
fetch nothing, or a stranger's package."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

_SOURCE = Path(__file__).absolute().parents[2]


def extra(name: str, *, source: Path = _SOURCE, prefix: str = sys.prefix) -> str:
    """The command that installs an extra. In a checkout's own environment (``source``, ``prefix``) it is
    its script; in another one pip, on the checkout where there is one, else on what the extra holds."""
    if (source / "scripts" / "setup").is_file():
        if Path(prefix) == source / ".venv":
            return f"./scripts/setup {name}"
        return f"{_pip(prefix)} install -e {shlex.quote(f'{source}[{name}]')}"
    return f"{_pip(prefix)} install {' '.join(shlex.quote(each) for each in _requirements(name))}"


def _pip(prefix: str) -> str:
    return f"{shlex.quote(str(Path(prefix) / 'bin' / 'python'))} -m pip"


def _requirements(name: str) -> list[str]:
    """``rollserve[name]`` itself where rollserve is not installed as a package."""
    try:
        declared = requires("rollserve") or []
    except PackageNotFoundError:
        declared = []
    split = (line.partition(";") for line in declared)
    ours = {f"extra == '{name}'", f'extra == "{name}"'}
    return [what.strip() for what, _, marker in split if marker.strip() in ours] or [f"rollserve[{name}]"]
