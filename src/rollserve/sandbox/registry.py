"""Runtimes by name. A runtime's module is imported when the runtime is made, not before."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from rollserve.errors import UnknownName
from rollserve.sandbox.base import Runtime

if TYPE_CHECKING:
    from rollserve.sandbox.apptainer import ApptainerSettings
    from rollserve.sandbox.containers.runtime import ContainerSettings
    from rollserve.sandbox.images.shelf import ImageSettings
    from rollserve.sandbox.kubernetes.settings import KubernetesSettings
    from rollserve.sandbox.remote.swerex import RemoteSettings

RUNTIMES = MappingProxyType(
    {
        "apptainer": "rollserve.sandbox.apptainer:ApptainerRuntime",
        "bubblewrap": "rollserve.sandbox.bubblewrap:BubblewrapRuntime",
        "docker": "rollserve.sandbox.containers.runtime:DockerRuntime",
        "kubernetes": "rollserve.sandbox.kubernetes.runtime:KubernetesRuntime",
        "none": "rollserve.sandbox.none:NoneRuntime",
        "podman": "rollserve.sandbox.containers.runtime:PodmanRuntime",
        "process": "rollserve.sandbox.process:ProcessRuntime",
        "remote": "rollserve.sandbox.remote.swerex:SwerexRuntime",
    }
)

BUILT_IN = frozenset({"bubblewrap", "none", "process"})
"""Those that are tried wherever a server starts; the others where the settings name them."""

FROM_IMAGES = frozenset({"apptainer", "bubblewrap", "docker", "podman"})
"""Those that start from images of the cache."""

ON_HOST = frozenset({"bubblewrap", "process"})
"""Those whose image ``host`` has this machine's programs."""

ELSEWHERE = frozenset({"kubernetes", "remote"})
"""Those whose sandboxes are on other machines."""

_TAKES = MappingProxyType(
    {
        "apptainer": ("images", "cgroup", "apptainer"),
        "bubblewrap": ("images", "cgroup"),
        "docker": ("images", "containers"),
        "kubernetes": ("kubernetes",),
        "podman": ("images", "containers"),
        "remote": ("remote",),
    }
)


@dataclass(frozen=True)
class RuntimeOptions:
    """What some runtimes take; None is a runtime's own default. Without ``images`` the cache of images lies
    in the worker's folder. ``cgroup`` is a delegated control group."""

    images: ImageSettings | None = None
    cgroup: Path | None = None
    containers: ContainerSettings | None = None
    apptainer: ApptainerSettings | None = None
    remote: RemoteSettings | None = None
    kubernetes: KubernetesSettings | None = None

    def of(self, name: str) -> dict[str, Any]:
        given = ((option, getattr(self, option)) for option in _TAKES.get(name, ()))
        return {option: value for option, value in given if value is not None}


def runtime_names() -> tuple[str, ...]:
    return tuple(sorted(RUNTIMES))


def make_runtime(name: str, data_dir: Path, options: RuntimeOptions = RuntimeOptions()) -> Runtime:
    """``data_dir`` is the worker's folder; a runtime keeps its remains in one named after itself.

    Call it, and use what it returns, on the thread of one event loop.
    """
    if name not in RUNTIMES:
        raise UnknownName("runtime", name, RUNTIMES, field="runtime")
    module, _, attribute = RUNTIMES[name].partition(":")
    runtime = getattr(import_module(module), attribute)(data_dir=data_dir, **options.of(name))
    return cast("Runtime", runtime)
