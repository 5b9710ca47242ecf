"""From the settings to what each runtime takes, and which runtimes a server has."""

from __future__ import annotations

from rollserve import config
from rollserve.build.images import image_settings
from rollserve.build.session_address import opening
from rollserve.config import Settings
from rollserve.sandbox.apptainer import ApptainerSettings
from rollserve.sandbox.containers.runtime import ContainerSettings
from rollserve.sandbox.kubernetes.settings import KubernetesSettings, Opening
from rollserve.sandbox.registry import BUILT_IN, RuntimeOptions, runtime_names
from rollserve.sandbox.remote.swerex import RemoteSettings


def runtime_options(settings: Settings) -> RuntimeOptions:
    containers = settings.containers
    return RuntimeOptions(
        images=image_settings(settings),
        cgroup=settings.workers.cgroup,
        containers=ContainerSettings(
            commands={"podman": tuple(containers.podman), "docker": tuple(containers.docker)},
            starts_at_once=containers.starts_at_once,
            read_only=containers.read_only,
        ),
        apptainer=ApptainerSettings(
            command=tuple(containers.apptainer), starts_at_once=containers.starts_at_once
        ),
        remote=RemoteSettings(
            deployment=settings.remote.deployment,
            isolated=settings.remote.isolated,
            starts_at_once=settings.remote.starts_at_once,
            start_s=settings.remote.start_s,
        ),
        kubernetes=_kubernetes(settings.kubernetes, opening(settings)),
    )


def _kubernetes(told: config.KubernetesSettings, sessions: tuple[str, int, int] | None) -> KubernetesSettings:
    return KubernetesSettings(
        kubeconfig=told.kubeconfig,
        context=told.context,
        namespace=told.namespace,
        pod_template=told.pod_template,
        node_selector=told.node_selector,
        tolerations=tuple(told.tolerations),
        image_pull_secrets=tuple(told.image_pull_secrets),
        runtime_class=told.runtime_class,
        run_as_user=told.run_as_user,
        network_policy=told.network_policy,
        opening=None if sessions is None else Opening(*sessions),
        isolated=told.isolated,
        starts_at_once=told.starts_at_once,
        start_s=told.start_s,
    )


def offered(settings: Settings) -> tuple[str, ...]:
    """The names that tasks of this server may use, whether they work here or not."""
    named = {*BUILT_IN, settings.workers.runtime, *settings.workers.runtimes}
    return tuple(name for name in runtime_names() if name in named)
