"""``rollserve doctor``: what this machine can do, and how to mend what it can't."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import resource
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollserve import config, installing
from rollserve.agent.harness.base import is_installed
from rollserve.agent.harness.table import HARNESSES
from rollserve.build.catalogs import NO_SANDBOX, runtime_reports
from rollserve.build.data_dir import check_data_dir
from rollserve.build.probes import identify
from rollserve.build.session_address import read_session_addresses
from rollserve.cli.output import out, print_json
from rollserve.errors import ConfigError, RollserveError
from rollserve.sandbox.base import STANDARD_PATH, RuntimeReport
from rollserve.sandbox.registry import ELSEWHERE

OPEN_FILES_WANTED = 8192
FREE_DISK_WANTED_GB = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """``level``: ``ok``, ``note`` (works, with a limit) or ``problem``."""

    name: str
    level: str
    detail: str
    remedy: str = ""


def _python() -> Finding:
    system = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores"
    return Finding("python", "ok", f"Python {platform.python_version()} on {system}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files (hard limit {hard})"
    if soft >= OPEN_FILES_WANTED:
        return Finding("file limit", "ok", text)
    remedy = f"ulimit -n {min(hard, 20000)}; a few hundred sandboxes need some thousand descriptors"
    return Finding("file limit", "note", text, remedy)


def _disk(path: Path) -> Finding:
    place = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    free_gb = shutil.disk_usage(place).free / 1e9
    text = f"{free_gb:.1f} GB free for {path}"
    try:
        check_data_dir(path)
    except ConfigError as error:
        return Finding("disk", "problem", error.message, "set data_dir elsewhere")
    if free_gb < FREE_DISK_WANTED_GB:
        return Finding("disk", "problem", text, "free some space, or set data_dir elsewhere")
    return Finding("disk", "ok", text)


def _runtime(report: RuntimeReport, default: str) -> Finding:
    label = f"runtime {report.name}"
    if not report.usable:
        level = "problem" if report.name == default else "note"
        return Finding(label, level, report.detail or "does not work here", report.remedy)
    enforced = f"; holds for a sandbox: {', '.join(report.enforces) or 'no bounds'}"
    if report.per_process:
        enforced += f"; for each of its processes: {', '.join(report.per_process)}"
    if not report.isolated and report.name != NO_SANDBOX:
        unsafe = "" if report.detail.startswith("UNSAFE") else "UNSAFE, claims no isolation: "
        return Finding(label, "note", f"{unsafe}{report.detail}{enforced}", "for trusted tasks only")
    return Finding(label, "ok", f"{report.detail or 'works'}{enforced}")


def _session_address(settings: config.Settings) -> Finding:
    """For agents inside sandboxes that are elsewhere."""
    name, url = "session address", settings.session_address.url
    try:
        addresses = read_session_addresses(settings)
    except ConfigError as error:
        return Finding(name, "problem", str(error), error.hint or "see docs/operations.md")
    named = {settings.workers.runtime, *settings.workers.runtimes}
    if addresses is not None:
        how = "TLS" if addresses.tls is not None else "plain HTTP"
        return Finding(name, "ok", f"{url}; workers listen on {addresses.host} by {how}")
    if named.isdisjoint(ELSEWHERE):
        return Finding(name, "ok", "none, and no runtime here needs one")
    remedy = "session_address.url, .certificate_file and .key_file (docs/sandboxes.md)"
    return Finding(name, "note", "none: no agents inside sandboxes of `remote` and `kubernetes`", remedy)


def _extras() -> list[Finding]:
    wanted = {
        "kubernetes": ("lightkube", "runtime `kubernetes`"),
        "math": ("math_verify", "grader `math`"),
        "mcp": ("mcp", "tools of MCP servers"),
        "remote": ("swerex", "runtime `remote`"),
        "local": ("torch", "local inference server"),
        "train": ("torch", "GRPO trainer"),
    }
    findings = []
    for extra, (module, what) in wanted.items():
        if importlib.util.find_spec(module):
            findings.append(Finding(f"extra {extra}", "ok", f"{what}: installed"))
        else:
            remedy = installing.extra(extra)
            findings.append(Finding(f"extra {extra}", "note", f"{what}: not installed", remedy))
    return findings


def _harnesses(folder: Path) -> Finding:
    """Command-line agents: in their folder, for mounting, or among this machine's programs."""
    mounted = [name for name, each in HARNESSES.items() if is_installed(each, folder)]
    on_path = [
        name
        for name, each in HARNESSES.items()
        if name not in mounted and shutil.which(each.program, path=STANDARD_PATH)
    ]
    found = [f"in {folder}: {', '.join(mounted)}"] if mounted else []
    if on_path:
        found.append(f"on the PATH of the image `host`: {', '.join(on_path)}")
    missing = [name for name in HARNESSES if name not in (*mounted, *on_path)]
    if not missing:
        return Finding("harnesses", "ok", "; ".join(found))
    command = f"{shlex.quote(sys.executable)} -m rollserve.agent.harness.install"
    remedy = (
        f"{command} --into {shlex.quote(str(folder))} {missing[0]}   (needed only for tasks that name one)"
    )
    found.append(f"not installed: {', '.join(missing)}")
    return Finding("harnesses", "ok" if mounted or on_path else "note", "; ".join(found), remedy)


async def _backend(url: str) -> Finding:
    try:
        info = await identify(url)
    except RollserveError as error:
        return Finding(f"backend {url}", "problem", error.message, error.hint or "")
    text = f"{info.engine}, serves {', '.join(info.models)}, logprobs {info.logprobs_mode}"
    level = "note" if info.warnings else "ok"
    return Finding(f"backend {url}", level, text, "; ".join(info.warnings))


def _settings(path: Path | None, overrides: dict[str, Any]) -> tuple[config.Settings, Finding]:
    try:
        settings = config.load(config=path, overrides=overrides)
    except ConfigError as error:
        return config.Settings(), Finding("settings", "problem", str(error), "see docs/operations.md")
    source = config.config_file(path)
    return settings, Finding(
        "settings", "ok", f"from {source}" if source else "defaults (no rollserve.toml here)"
    )


async def doctor(path: Path | None, overrides: dict[str, Any], backends: list[str], *, as_json: bool) -> int:
    """Exit code 1 when there is a problem."""
    settings, finding = _settings(path, overrides)
    findings = [_python(), finding, _open_files(), _disk(settings.data_dir)]
    default = settings.workers.runtime
    findings.append(_session_address(settings))
    if findings[-1].level == "problem":
        settings = settings.model_copy(update={"session_address": config.SessionAddressSettings()})
    findings += [_runtime(report, default) for report in runtime_reports(settings)]
    findings += _extras()
    findings.append(_harnesses(settings.harness_folder))
    findings += await asyncio.gather(*(_backend(url) for url in backends))
    worst = any(finding.level == "problem" for finding in findings)
    if as_json:
        print_json({"ok": not worst, "findings": [asdict(finding) for finding in findings]})
        return int(worst)
    marks = {"ok": ("✓", "green"), "note": ("•", "yellow"), "problem": ("✗", "red")}
    for finding in findings:
        mark, style = marks[finding.level]
        out.print(f"{mark} {finding.name}: {finding.detail}", style=style, markup=False, soft_wrap=True)
        if finding.remedy:
            out.print(f"    → {finding.remedy}", markup=False, soft_wrap=True)
    return int(worst)
