"""The settings tree, and the only reader of the environment.

Precedence, highest first: command-line flags (``load(overrides=…)``), environment
(``ROLLSERVE_WORKERS__COUNT=4``), the TOML file (``--config``, else ``ROLLSERVE_CONFIG``, else
``rollserve.toml`` in the current folder), defaults.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from rollserve.errors import ConfigError

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
    allow_unsafe_runtime: bool = False
    allow_unheld_limits: bool = False
    cgroup: Path | None = None
    spare_sandboxes: Annotated[int, Field(ge=0, le=10_000)] = 16
    gateway_host: str = "127.0.0.1"
    harness_dir: Path | None = None
    code_hosts: Slots = 32
    code_memory_mb: Annotated[int | None, Field(ge=64)] = None
    shutdown_grace_s: float = 5.0


class ImagesSettings(_Section):
    """The cache of sandbox images: where it lies, how large it may grow; time-outs of a task's prepare steps
    together and of one RUN of a recipe; how registries are spoken to."""

    dir: Path | None = None
    max_gb: Annotated[float, Field(gt=0)] = 50.0
    prepare_s: Annotated[float, Field(gt=0)] = 600.0
    step_s: Annotated[float, Field(gt=0)] = 1800.0
    auth_file: Path | None = None
    insecure_registries: list[str] = []


class BackendsSettings(_Section):
    """When a worker asks a backend on which nothing moves for its health, and when it gives up a
    generation that says nothing; how long a new one takes to get its whole share; whether backends are
    asked for the logprobs of a few tokens after each change of weights, and how far these may be apart;
    how many calls a worker has on a backend at once: as many as its metrics speak for (``auto``), a number,
    or any (``off``)."""

    quiet_s: Annotated[float, Field(gt=0)] = 120.0
    silent_s: Annotated[float, Field(gt=0)] = 600.0
    slow_start_s: Annotated[float, Field(ge=0)] = 30.0
    concurrency: Literal["auto", "off"] | Annotated[int, Field(ge=1)] = "auto"
    canary: bool = True
    canary_tolerance: Annotated[float, Field(gt=0)] = 0.1


class DeliverySettings(_Section):
    lease_ttl_s: Annotated[float, Field(gt=0)] = 300.0
    max_wait_s: Annotated[float, Field(gt=0)] = 60.0


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
    images: ImagesSettings = ImagesSettings()
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
            near = get_close_matches(where, _names(Settings), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "docs/operations.md lists the settings"
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
