"""What tasks can name on this machine: runtimes, agents, graders, tools; and the check of a task
against it, before anything is stored or started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from rollserve.agent.registry import AgentCatalog
from rollserve.agent.toolbox import ToolCatalog
from rollserve.build.images import image_settings
from rollserve.config import Settings, WorkerSettings
from rollserve.errors import ConfigError, InvalidInput, UnknownName
from rollserve.grader.registry import GraderCatalog
from rollserve.records.task import Task
from rollserve.sandbox.base import Runtime, RuntimeReport
from rollserve.sandbox.images.reference import HOST
from rollserve.sandbox.registry import FROM_IMAGES, make_runtime, runtime_names
from rollserve.usercode.hosts import HostSettings, ZygoteHosts

NO_SANDBOX = "none"


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
    for name in runtime_names():
        runtime = make_runtime(name, folder, image_settings(settings), settings.workers.cgroup)
        report = runtime.report()
        if report.usable and (accepts_unsafe or report.isolated or name == NO_SANDBOX):
            runtimes[name] = runtime
    return runtimes


def check_default_runtime(settings: Settings) -> RuntimeReport:
    """Raises ``ConfigError`` when the default runtime can't be used here, or not without consent."""
    workers: WorkerSettings = settings.workers
    if workers.runtime not in runtime_names():
        problem = UnknownName("runtime", workers.runtime, runtime_names())
        raise ConfigError(problem.message, field="workers.runtime", hint=problem.hint)
    folder = settings.data_dir.absolute() / "runtimes"
    report = make_runtime(workers.runtime, folder, cgroup=workers.cgroup).report()
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

    async def check_task(self, task: Task, field: str) -> None:
        """Raises ``InvalidInput`` whose field begins with ``field``."""
        dot = f"{field}." if field else ""
        try:
            await self.agents.check(task.agent)
            await self.graders.check(task.grader)
            await self.tools.check(task)
            await self._check_place(task)
        except InvalidInput as error:
            error.field = f"{dot}{error.field}" if error.field else field or None
            raise

    async def _check_place(self, task: Task) -> None:
        name = task.runtime or self.default_runtime
        if name not in self.runtimes:
            if name in runtime_names():
                raise InvalidInput(
                    f"the runtime {name!r} can't be used here: it does not work on this machine, or it "
                    "isolates nothing and this server does not accept that",
                    field="runtime",
                    hint="`rollserve doctor` says which; --allow-unsafe-runtime accepts the latter",
                )
            raise UnknownName("runtime", name, self.runtimes, field="runtime")
        if task.image != HOST:  # which most tasks name, and is always there
            await asyncio.to_thread(self.runtimes[name].check_image, task.image)
        await asyncio.to_thread(self._check_limits, task, name)
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


def make_catalogs(settings: Settings, hosts: ZygoteHosts) -> Catalogs:
    return Catalogs(
        agents=AgentCatalog(hosts, harness_dir=settings.harness_folder),
        graders=GraderCatalog(hosts),
        tools=ToolCatalog(hosts),
        runtimes=make_runtimes(settings),
        default_runtime=settings.workers.runtime,
        allow_unheld_limits=settings.workers.allow_unheld_limits,
    )


def runtime_reports(settings: Settings) -> list[RuntimeReport]:
    """Of every runtime there is, usable or not."""
    folder = settings.data_dir.absolute() / "runtimes"
    cgroup = settings.workers.cgroup
    return [make_runtime(name, folder, cgroup=cgroup).report() for name in runtime_names()]
