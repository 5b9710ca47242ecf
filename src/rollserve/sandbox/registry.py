"""Runtimes by name. A runtime's module is imported when the runtime is made, not before."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import cast

from rollserve.errors import UnknownName
from rollserve.sandbox.base import Runtime

RUNTIMES = MappingProxyType(
    {
        "bubblewrap": "rollserve.sandbox.bubblewrap:BubblewrapRuntime",
        "none": "rollserve.sandbox.none:NoneRuntime",
        "process": "rollserve.sandbox.process:ProcessRuntime",
    }
)


def runtime_names() -> tuple[str, ...]:
    return tuple(sorted(RUNTIMES))


def make_runtime(name: str, data_dir: Path) -> Runtime:
    """``data_dir`` is the worker's folder; a runtime keeps its remains in one named after itself.

    Call it, and use what it returns, on the thread of one event loop.
    """
    if name not in RUNTIMES:
        raise UnknownName("runtime", name, RUNTIMES, field="runtime")
    module, _, attribute = RUNTIMES[name].partition(":")
    runtime = getattr(import_module(module), attribute)(data_dir=data_dir)
    return cast("Runtime", runtime)
