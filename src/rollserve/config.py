"""The settings tree, and the only reader of the environment.

Precedence, highest first: command-line flags (``load(overrides=…)``), environment
(``ROLLSERVE_WORKERS__COUNT=4``), the TOML file (``--config``, else ``ROLLSERVE_CONFIG``, else
``rollserve.toml`` in the current folder), defaults.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, IPvAnyNetwork, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from rollserve.errors import ConfigError, nearest

OTHER_VARIABLES = frozenset({"url", "api_key", "config", "venv", "test_harnesses", "test_processes"})
"""``ROLLSERVE_…`` variables that are no settings."""

Slots = Annotated[int, Field(ge=1, le=100_000)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ApiSettings(_Section):
    """``host`` other than a loopback address needs a key. ``max_body_mb`` bounds a request,
    ``max_requests`` how many are in flight at once, event streams and waiting leases among them."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    max_body_mb: Annotated[int, Field(ge=1, le=4096)] = 64
    max_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    max_groups_per_request: Annotated[int, Field(ge=1)] = 10_000
    max_rollouts_per_group: Annotated[int, Field(ge=1)] = 1024
    max_event_streams: Annotated[int, Field(ge=1)] = 256
    max_waiting_leases: Annotated[int, Field(ge=1)] = 1024
    require_key: bool = False


class StoreSettings(_Section):
    """``synchronous`` is SQLite's: ``normal`` survives the death of processes, ``full`` of the
    machine."""

    url: str | None = None
    synchronous: Literal["normal", "full"] = "normal"
    keep_events: Annotated[int, Field(ge=1000)] = 200_000


class WorkerSettings(_Section):
    """Of each worker process: slots by stage and the size of the ready buffer between init and
    run."""

    count: Annotated[int, Field(ge=1, le=1024)] = 1
    init_slots: Slots = 8
    ready_slots: Slots = 16
    run_slots: Slots = 64
    grade_slots: Slots = 16
    runtime: str = "bubblewrap"
    runtimes: list[str] = []
    allow_unsafe_runtime: bool = False
    allow_unheld_limits: bool = False
    cgroup: Path | None = None
    spare_sandboxes: Annotated[int, Field(ge=0, le=10_000)] = 16
    gateway_host: str = "127.0.0.1"
    harness_dir: Path | None = None
    code_hosts: Slots = 32
    code_memory_mb: Annotated[int | None, Field(ge=64)] = None
    shutdown_grace_s: float = 5.0


class GatewaySettings(_Section):
    """Images in the messages of agents: the size of one, how many a request may hold, and the size of all
    that a session sends, each counted once."""

    image_mb: Annotated[int, Field(ge=1, le=1024)] = 20
    request_images: Annotated[int, Field(ge=1, le=10_000)] = 200
    session_images_mb: Annotated[int, Field(ge=1, le=65_536)] = 256


class ImagesSettings(_Section):
    """The cache of sandbox images: where it lies, how large it may grow; time-outs of a task's prepare steps
    together and of one RUN of a recipe; how registries are spoken to."""

    dir: Path | None = None
    max_gb: Annotated[float, Field(gt=0)] = 50.0
    prepare_s: Annotated[float, Field(gt=0)] = 600.0
    step_s: Annotated[float, Field(gt=0)] = 1800.0
    auth_file: Path | None = None
    insecure_registries: list[str] = []


class NetworkSettings(_Section):
    """The most that a task's ``network`` may ask for; private networks that are open then, and what is closed
    besides; of each sandbox, connections at once and megabytes both ways."""

    tasks_may_ask: Literal["none", "hosts", "full"] = "none"
    reach: list[IPvAnyNetwork] = []
    deny: list[IPvAnyNetwork] = []
    connections: Annotated[int, Field(ge=1, le=10_000)] = 64
    max_mb: Annotated[int, Field(ge=1)] = 4096


class ContainersSettings(_Section):
    """The commands of container engines and of Apptainer, with what comes before a subcommand; how many of
    each are started at once on this machine; whether images of engines are read-only, so that all that is
    written is bounded."""

    podman: Annotated[list[str], Field(min_length=1)] = ["podman"]
    docker: Annotated[list[str], Field(min_length=1)] = ["docker"]
    apptainer: Annotated[list[str], Field(min_length=1)] = ["apptainer"]
    starts_at_once: Annotated[int, Field(ge=1, le=1000)] = 4
    read_only: bool = False


class RemoteSettings(_Section):
    """Machines elsewhere, by SWE-ReX: its configuration of a deployment; whether you vouch that a machine is
    isolated and has no network; how many are started at once, and how long one start may take."""

    deployment: dict[str, Any] = {}
    isolated: bool = False
    starts_at_once: Annotated[int, Field(ge=1, le=1000)] = 8
    start_s: Annotated[float, Field(gt=0)] = 600.0


class KubernetesSettings(_Section):
    """Pods of a cluster: how to reach it and in which namespace; a file with a pod that ours is laid over,
    and fields of it; the user that programs run as instead of the image's; whether a network policy is made
    that lets nothing in or out, and whether you vouch that the cluster enforces it; how many are started at
    once, and how long one start may take."""

    kubeconfig: Path | None = None
    context: str = ""
    namespace: Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$")] = ""
    pod_template: Path | None = None
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    image_pull_secrets: list[str] = []
    runtime_class: str = ""
    run_as_user: Annotated[int | None, Field(ge=1)] = None
    network_policy: bool = True
    isolated: bool = False
    starts_at_once: Annotated[int, Field(ge=1, le=1000)] = 8
    start_s: Annotated[float, Field(gt=0)] = 600.0


class SessionAddressSettings(_Section):
    """Where agents in sandboxes elsewhere (``remote``, ``kubernetes``) reach their session: the URL they are
    given, with ``{port}`` for the worker's; the host a worker listens on for it, and a range of ports of
    which it takes the first that is free; certificate and key (PEM, both may be in one file); what such a
    sandbox is to trust beside what it does anyway; whether plain HTTP may leave the loopback network."""

    url: str | None = None
    host: str = "0.0.0.0"
    ports: Annotated[str, BeforeValidator(str), Field(pattern=r"^[0-9]{1,5}(-[0-9]{1,5})?$")] = "8800-8899"
    certificate_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None
    allow_plain: bool = False


class BackendsSettings(_Section):
    """How often the server looks at each backend. When a worker asks a backend on which nothing moves for
    its health, and when it gives up a generation that says nothing; how long a new one takes to get its
    whole share; whether backends are asked for the logprobs of a few tokens after each change of weights,
    and how far these may be apart; how many calls a worker has on a backend at once: as many as its metrics
    speak for (``auto``), a number, or any (``off``); what reading a token of a prompt costs in sampled ones,
    which bounds how long a call waits for the backend that has read its prompt before; how many times slower
    than its peers one may be (0: any); where the calls of a session go (to where it was, each to the least
    busy, or in turn)."""

    check_s: Annotated[float, Field(gt=0)] = 15.0
    quiet_s: Annotated[float, Field(gt=0)] = 120.0
    silent_s: Annotated[float, Field(gt=0)] = 600.0
    slow_start_s: Annotated[float, Field(ge=0)] = 30.0
    concurrency: Literal["auto", "off"] | Annotated[int, Field(ge=1)] = "auto"
    read_cost: Annotated[float, Field(ge=0)] = 0.1
    outlier_ratio: Annotated[float, Field(ge=0)] = 3.0
    routing: Literal["sticky", "least_busy", "in_turn"] = "sticky"
    canary: bool = True
    canary_tolerance: Annotated[float, Field(gt=0)] = 0.1


class DeliverySettings(_Section):
    """Callbacks may go to public addresses, and to those in ``callback_networks``. A try waits
    ``callback_timeout_s`` for its answer; a URL is sent ``callback_in_flight`` messages at once. A message is
    given up after ``callback_tries``, or when it is ``callback_age_s`` old."""

    lease_ttl_s: Annotated[float, Field(gt=0)] = 300.0
    max_wait_s: Annotated[float, Field(gt=0)] = 60.0
    callback_networks: list[IPvAnyNetwork] = [ip_network("127.0.0.0/8"), ip_network("::1/128")]
    callback_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    callback_in_flight: Annotated[int, Field(ge=1, le=256)] = 4
    callback_tries: Annotated[int, Field(ge=1, le=1000)] = 12
    callback_age_s: Annotated[float, Field(gt=0)] = 86400.0


class Settings(BaseSettings):
    """``data_dir`` holds database, payloads and logs. ``code_dir`` is a folder of the user's Python
    (agents, graders, tools, filters), put on the import path of code hosts only. ``source_dir`` is the
    folder of task files (JSONL) that runs may take their tasks from."""

    model_config = SettingsConfigDict(
        env_prefix="ROLLSERVE_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
    )

    data_dir: Path = Path(".rollserve")
    code_dir: Path | None = None
    source_dir: Path | None = None
    preload: list[str] = []
    """Import paths of user code checked at start-up (``my.module:Class``)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    api: ApiSettings = ApiSettings()
    store: StoreSettings = StoreSettings()
    workers: WorkerSettings = WorkerSettings()
    gateway: GatewaySettings = GatewaySettings()
    images: ImagesSettings = ImagesSettings()
    network: NetworkSettings = NetworkSettings()
    containers: ContainersSettings = ContainersSettings()
    remote: RemoteSettings = RemoteSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    session_address: SessionAddressSettings = SessionAddressSettings()
    backends: BackendsSettings = BackendsSettings()
    delivery: DeliverySettings = DeliverySettings()

    @property
    def store_url(self) -> str:
        return self.store.url or f"sqlite:///{(self.data_dir / 'rollserve.db').absolute()}"

    @property
    def harness_folder(self) -> Path:
        return (self.workers.harness_dir or self.data_dir / "harnesses").absolute()

    @property
    def image_folder(self) -> Path:
        return (self.images.dir or self.data_dir / "images").absolute()

    @property
    def registry_auth_file(self) -> Path:
        """Docker's own ``config.json`` unless another file is named."""
        docker = os.environ.get("DOCKER_CONFIG")
        folder = Path(docker) if docker else Path("~/.docker").expanduser()
        return self.images.auth_file or folder / "config.json"

    @property
    def payload_dir(self) -> Path:
        return self.data_dir.absolute() / "payloads"


def config_file(explicit: Path | None) -> Path | None:
    """The TOML file that applies. Raises ``ConfigError`` when a named one does not exist."""
    named = explicit or (Path(env) if (env := os.environ.get("ROLLSERVE_CONFIG")) else None)
    if named is not None:
        if not named.is_file():
            raise ConfigError(f"no such settings file: {named}", field="config")
        return named
    default = Path("rollserve.toml")
    return default if default.is_file() else None


def load(*, config: Path | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Read settings. Raises ``ConfigError`` naming the first field at fault."""
    toml = config_file(config)
    _check_environment()

    class _FromSources(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = () if toml is None else (TomlConfigSettingsSource(settings_cls, toml_file=toml),)
            return (init_settings, env_settings, *file)

    try:
        return _FromSources(**(overrides or {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            hint = nearest(where, _names(Settings), cutoff=0.6) or "docs/operations.md lists the settings"
            raise ConfigError("no such setting", field=where, hint=hint) from error
        raise ConfigError(first["msg"], field=where, hint="see docs/operations.md") from error
    except ValueError as error:
        raise ConfigError(str(error), field="config") from error


def _check_environment() -> None:
    """pydantic overlooks a variable whose first part is no setting. Raises ``ConfigError``."""
    known = {name.replace(".", "__"): name.replace(".", "_") for name in _names(Settings)}
    for variable in os.environ:
        name = variable.lower().removeprefix("rollserve_")
        if name == variable.lower() or name in OTHER_VARIABLES:
            continue
        if name.partition("__")[0] in Settings.model_fields:
            continue  # what comes after is checked with the values
        near = get_close_matches(name.replace("__", "_"), known.values(), n=1, cutoff=0.85)
        if near:
            (meant,) = (key for key, flat in known.items() if flat == near[0])
            hint = f"did you mean ROLLSERVE_{meant.upper()}?"
            raise ConfigError("no such setting", field=variable, hint=hint)


def _names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Of every setting, dotted."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += _names(inner, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def client_environment() -> tuple[str | None, str | None]:
    """``ROLLSERVE_URL`` and ``ROLLSERVE_API_KEY``: where and as whom a command speaks to a server."""
    return os.environ.get("ROLLSERVE_URL"), os.environ.get("ROLLSERVE_API_KEY")
