"""What tasks can name on this machine: runtimes, agents, graders, tools; and the check of a task
against it, before anything is stored or started."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollserve.agent.base import AgentEntry
from rollserve.agent.registry import AgentCatalog
from rollserve.agent.toolbox import ToolCatalog
from rollserve.build.files import check_files
from rollserve.build.network import check_network
from rollserve.build.runtimes import offered, runtime_options
from rollserve.config import Settings, WorkerSettings
from rollserve.dialect.images import Pictures
from rollserve.errors import ConfigError, InvalidInput, UnknownName
from rollserve.grader.registry import GraderCatalog
from rollserve.records.task import Task
from rollserve.sandbox.base import STANDARD_PATH, Runtime, RuntimeReport
from rollserve.sandbox.images.reference import HOST
from rollserve.sandbox.registry import FROM_IMAGES, ON_HOST, make_runtime, runtime_names
from rollserve.usercode.hosts import HostSettings, ZygoteHosts

NO_SANDBOX = "none"

MAX_PICTURE_CHARS = 8 << 20
"""A task travels to its worker with each attempt."""


def make_hosts(settings: Settings) -> ZygoteHosts:
    return ZygoteHosts(
        code_dir=settings.code_dir,
        max_hosts=settings.workers.code_hosts,
        preload=settings.preload,
        settings=HostSettings(memory_mb=settings.workers.code_memory_mb),
    )


def make_runtimes(settings: Settings) -> dict[str, Runtime]:
    """Those that work here, by name; those that isolate nothing only where the settings accept them."""
    folder = settings.data_dir.absolute() / "runtimes"
    accepts_unsafe = settings.workers.allow_unsafe_runtime
    runtimes: dict[str, Runtime] = {}
    for name in offered(settings):
        runtime = make_runtime(name, folder, runtime_options(settings))
        report = runtime.report()
        if report.usable and (accepts_unsafe or report.isolated or name == NO_SANDBOX):
            runtimes[name] = runtime
    return runtimes


def check_default_runtime(settings: Settings) -> RuntimeReport:
    """Raises ``ConfigError`` when the default runtime can't be used here, or not without consent."""
    workers: WorkerSettings = settings.workers
    for field, name in (("runtime", workers.runtime), *(("runtimes", name) for name in workers.runtimes)):
        if name not in runtime_names():
            problem = UnknownName("runtime", name, runtime_names())
            raise ConfigError(problem.message, field=f"workers.{field}", hint=problem.hint)
    folder = settings.data_dir.absolute() / "runtimes"
    report = make_runtime(workers.runtime, folder, runtime_options(settings)).report()
    if not report.usable:
        raise ConfigError(
            f"the runtime {report.name!r} does not work on this machine: {report.detail}",
            field="workers.runtime",
            hint=report.remedy or "`rollserve doctor` says what does",
        )
    if not report.isolated and report.name != NO_SANDBOX and not workers.allow_unsafe_runtime:
        raise ConfigError(
            f"the runtime {report.name!r} is UNSAFE: it isolates nothing, what a model writes runs as you",
            field="workers.runtime",
            hint="--allow-unsafe-runtime accepts that",
        )
    return report


@dataclass(frozen=True, kw_only=True)
class Catalogs:
    agents: AgentCatalog
    graders: GraderCatalog
    tools: ToolCatalog
    runtimes: Mapping[str, Runtime]
    default_runtime: str
    allow_unheld_limits: bool = False
    tasks_may_ask: str = "none"
    advertises_sessions: bool = False

    async def check_task(self, task: Task, field: str) -> None:
        """Raises ``InvalidInput`` whose field begins with ``field``."""
        dot = f"{field}." if field else ""
        try:
            check_files(task.files)
            await self.agents.check(task.agent)
            if task.pictures:
                await self._check_pictures(task)
            await self.graders.check(task.grader)
            await self.tools.check(task)
            await self._check_place(task)
        except InvalidInput as error:
            error.field = f"{dot}{error.field}" if error.field else field or None
            raise

    async def _check_pictures(self, task: Task) -> None:
        if not (await self.agents.resolve(task.agent)).shows_pictures:
            raise InvalidInput(
                f"the agent {task.agent.name!r} shows no pictures to its model",
                field="pictures",
                hint="the agent 'tool' does, and Python classes of yours may",
            )
        if sum(len(picture.url) for picture in task.pictures) > MAX_PICTURE_CHARS:
            raise InvalidInput(
                f"the pictures of a task have {MAX_PICTURE_CHARS} characters at most, as URLs",
                field="pictures",
                hint="give large ones as an address (https://…)",
            )
        read = Pictures()
        for index, picture in enumerate(task.pictures):
            where = f"pictures.{index}"
            if picture.at is not None and picture.at > len(task.instruction):
                raise InvalidInput("it stands behind the end of the instruction", field=f"{where}.at")
            await asyncio.to_thread(read.of_address, picture.url, where, f"{where}.url")

    async def _check_place(self, task: Task) -> None:
        name = task.runtime or self.default_runtime
        if name not in self.runtimes:
            if name in runtime_names():
                raise InvalidInput(
                    f"the runtime {name!r} can't be used here: it does not work on this machine, the "
                    "settings do not name it, or it isolates nothing and this server does not accept that",
                    field="runtime",
                    hint="`rollserve doctor` says which; the setting workers.runtimes names more; "
                    "--allow-unsafe-runtime accepts the last",
                )
            raise UnknownName("runtime", name, self.runtimes, field="runtime")
        if task.image != HOST:  # which most tasks name, and is always there
            await asyncio.to_thread(self.runtimes[name].check_image, task.image)
        await asyncio.to_thread(self._check_limits, task, name)
        if task.network != "none":
            report = await asyncio.to_thread(self.runtimes[name].report)
            check_network(task.network, report, may_ask=self.tasks_may_ask)
        if task.prepare and name not in FROM_IMAGES:
            raise InvalidInput(
                f"the runtime {name!r} prepares no images", field="prepare", hint="bubblewrap does"
            )
        if name == NO_SANDBOX and await self.tools.needs_sandbox(task):
            raise InvalidInput("a tool of this task acts in a sandbox, and it has none", field="tools")
        if name == NO_SANDBOX and (await self.agents.resolve(task.agent)).acts_inside:
            raise InvalidInput("this agent acts in a sandbox, and the task has none", field="agent.name")
        if name == NO_SANDBOX and self._wants_sandbox(task):
            raise InvalidInput("this grader acts in a sandbox, and the task has none", field="grader.name")
        entry = await self.agents.resolve(task.agent)
        if entry.acts_inside:
            await asyncio.to_thread(self._check_way, name)
            await self._check_programs(task, name, entry)

    def _check_way(self, runtime: str) -> None:
        """From inside a sandbox to its session. Blocking."""
        can = self.runtimes[runtime].report().can
        if "listen" in can or ("dial" in can and self.advertises_sessions):
            return
        if "dial" not in can:
            raise InvalidInput(
                f"from a sandbox of the runtime {runtime!r} no agent inside reaches its session",
                field="runtime",
                hint="bubblewrap has a way",
            )
        raise InvalidInput(
            f"sandboxes of the runtime {runtime!r} are elsewhere, and this server advertises no address at "
            "which the agent inside reaches its session",
            field="runtime",
            hint="the operator's settings session_address.url (https://HOST:{port}), .certificate_file and "
            ".key_file; docs/sandboxes.md has more",
        )

    async def _check_programs(self, task: Task, runtime: str, entry: AgentEntry) -> None:
        """What can be known before a sandbox is made: an image of another kind, or one that commands or a
        ``PATH`` of the task's change, is looked into by the attempt."""
        options = dict(task.agent.options)
        mounts = await asyncio.to_thread(entry.mounts, options)
        if mounts and runtime not in FROM_IMAGES:
            raise InvalidInput(
                f"the runtime {runtime!r} mounts nothing, and {entry.name!r} is to be mounted",
                field="runtime",
                hint='use bubblewrap, or the agent\'s option "provide": "image" with its program on PATH',
            )
        if runtime not in ON_HOST:
            return
        if task.image != HOST or task.prepare or "PATH" in task.env:
            return
        missing = await asyncio.to_thread(_not_found, entry, options)
        if missing:
            raise InvalidInput(
                f"{entry.name!r} is not installed: no {', '.join(missing)} in the folder of harnesses, "
                "nor on the PATH that sandboxes have of this machine",
                field="agent.name",
                hint=entry.remedy,
            )

    def _check_limits(self, task: Task, runtime: str) -> None:
        """Blocking."""
        if not task.limits.require or self.allow_unheld_limits:
            return
        held = self.runtimes[runtime].report().enforces
        missing = [name for name in task.limits.require if name not in held]
        if missing:
            raise InvalidInput(
                f"the runtime {runtime!r} can't hold {', '.join(missing)} for a sandbox as a whole here",
                field="limits.require",
                hint=f"it holds {', '.join(held) or 'none'}: `rollserve doctor` says why; "
                "the setting workers.allow_unheld_limits goes on all the same",
            )

    def _wants_sandbox(self, task: Task) -> bool:
        return bool(task.grader.name == "command" or task.grader.options.get("carry"))


def _not_found(entry: AgentEntry, options: dict[str, Any]) -> list[str]:
    """Blocking."""
    return [name for name in entry.programs(options) if shutil.which(name, path=STANDARD_PATH) is None]


def make_catalogs(settings: Settings, hosts: ZygoteHosts) -> Catalogs:
    return Catalogs(
        agents=AgentCatalog(hosts, harness_dir=settings.harness_folder),
        graders=GraderCatalog(hosts),
        tools=ToolCatalog(hosts),
        runtimes=make_runtimes(settings),
        default_runtime=settings.workers.runtime,
        allow_unheld_limits=settings.workers.allow_unheld_limits,
        tasks_may_ask=settings.network.tasks_may_ask,
        advertises_sessions=settings.session_address.url is not None,
    )


def runtime_reports(settings: Settings) -> list[RuntimeReport]:
    """Of every runtime there is, usable or not."""
    folder = settings.data_dir.absolute() / "runtimes"
    options = runtime_options(settings)
    return [make_runtime(name, folder, options).report() for name in runtime_names()]
