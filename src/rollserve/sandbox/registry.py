"""Runtimes by name. A runtime's module is imported when the runtime is made, not before."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from rollserve.errors import UnknownName
from rollserve.sandbox.base import Runtime

if TYPE_CHECKING:
    from rollserve.sandbox.images.shelf import ImageSettings

RUNTIMES = MappingProxyType(
    {
        "bubblewrap": "rollserve.sandbox.bubblewrap:BubblewrapRuntime",
        "none": "rollserve.sandbox.none:NoneRuntime",
        "process": "rollserve.sandbox.process:ProcessRuntime",
    }
)


FROM_IMAGES = frozenset({"bubblewrap"})
"""Those that start from images of the cache."""

IN_GROUPS = frozenset({"bubblewrap"})
"""Those that put sandboxes into control groups."""


def runtime_names() -> tuple[str, ...]:
    return tuple(sorted(RUNTIMES))


def make_runtime(
    name: str, data_dir: Path, images: ImageSettings | None = None, cgroup: Path | None = None
) -> Runtime:
    """``data_dir`` is the worker's folder; a runtime keeps its remains in one named after itself. Without
    ``images`` the cache of images lies there too. ``cgroup`` is a delegated control group.

    Call it, and use what it returns, on the thread of one event loop.
    """
    if name not in RUNTIMES:
        raise UnknownName("runtime", name, RUNTIMES, field="runtime")
    module, _, attribute = RUNTIMES[name].partition(":")
    options: dict[str, Any] = {"images": images} if name in FROM_IMAGES else {}
    if name in IN_GROUPS:
        options["cgroup"] = cgroup
    runtime = getattr(import_module(module), attribute)(data_dir=data_dir, **options)
    return cast("Runtime", runtime)
