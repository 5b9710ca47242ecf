"""Real harnesses through the whole service.

``python -m rollserve.testing.harness_trial --from FOLDER [NAME…]``: a server with its worker, bubblewrap
sandboxes, and the scripted policy that follows a plan with whatever tools it is offered. Each harness writes
a file, changes it, looks at it and says what is in it, through its own dialect. Printed is what became of
its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollserve.agent.harness.base import Dialect, Harness
from rollserve.agent.harness.gemini_cli import SETTINGS as GEMINI_SETTINGS
from rollserve.agent.harness.table import HARNESSES
from rollserve.cli.processes import Processes
from rollserve.client import Client, FinishedGroup
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import RetrySettings, SamplingSettings
from rollserve.records.sample import TokenReport
from rollserve.records.task import AgentSpec, GraderSpec, Limits, Task
from rollserve.testing import harness_proxy
from rollserve.testing.scripted import Fault, Script, ScriptedEngine
from rollserve.testing.scripted_plan import editing_plan, follow, follow_through, long_plan
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend

POLICY = "scripted"
LIMITS = Limits(run_s=120.0, memory_mb=16384, processes=1024, max_turns=40)
CONTEXT_TOKENS = 1_000_000
"""The tiny tokenizer has few long tokens: a prompt of 50 kB is some 40,000 of them."""

FAULTS = (
    Fault(kind="drop", after_tokens=CONTEXT_TOKENS),
    Fault(kind="status", status=500),
    Fault(kind="drop", after_tokens=4),
)
"""The first call goes well, the second meets a refusal, and what follows it is broken off."""

MARK = "Now"
"""The second step begins with it."""

LATENCY_S = 2.0
"""Of an answer whose connection breaks: it is being sampled when the request comes again."""


class Trouble(StrEnum):
    """What befalls a harness on its way: the backend refuses a call and breaks off an answer, its connections
    break, or its context is small."""

    BACKEND = "backend"
    CONNECTION = "connection"
    COMPACTION = "compaction"


WINDOWS: Mapping[str, tuple[int, int]] = {
    "claude-code": (100_000, CONTEXT_TOKENS),
    "codex": (40_000, CONTEXT_TOKENS),
    "qwen-code": (110_000, CONTEXT_TOKENS),
    "gemini-cli": (CONTEXT_TOKENS, CONTEXT_TOKENS),
    "opencode": (40_000, CONTEXT_TOKENS),
    "pi": (200_000, 20_000),
    "openhands": (20_000, CONTEXT_TOKENS),
}
"""Of those that compact by themselves: what each is told of the context, and what it is. pi compacts where it
is refused, and when it has said its last word; gemini-cli is told a share of the million it believes in."""

_SMALL: Mapping[str, dict[str, str]] = {
    "pi": {"~/.pi/agent/settings.json": '{"compaction": {"enabled": true, "keepRecentTokens": 500}}'},
    "gemini-cli": {
        "~/.gemini/settings.json": json.dumps(
            json.loads(GEMINI_SETTINGS) | {"model": {"compressionThreshold": 0.005}}
        )
    },
}
"""Settings with which a trial is long enough to be compacted: the tiny tokenizer's tokens are few letters."""

_GOES_ON: Mapping[str, str] = {
    "gemini-cli": "&& gemini --yolo --skip-trust -m policy --resume latest -p 'Say it again.'"
}
"""What follows on its command line: gemini-cli splits a history at a person's words only, and so compacts
nothing before it is asked a second time."""

LEFT_OUT: Mapping[tuple[str, Trouble], str] = {
    ("gemini-cli", Trouble.CONNECTION): (
        "dropped before a reply only: it ends (exit code 1) where a connection closes in the middle of one"
    ),
    ("mini-swe-agent", Trouble.COMPACTION): "does not compact: it ends where its context is full",
}
"""What a harness cannot do, whatever it is answered: said below the table."""

COLUMNS = (
    *("harness", "dialect", "completed", "calls", "generations", "labels", "branches"),
    *("exact", "sequences", "untrainable"),
)


_NOTHING = TokenReport(calls=0, sequences=0, sampled=0, trained=0, tokens=0, left_out={}, by_label={})


@dataclass(kw_only=True)
class Trial:
    """``generations`` are what the backend was asked for. ``labels`` counts the calls that are no
    continuation, ``branches`` says of each call that does not extend the newest line why it began one of its
    own; ``exact`` is the share of sampled tokens that a sample trains; ``lost`` are the others by cause."""

    harness: str
    dialect: str
    completed: bool
    why: str = ""
    rollout: str = ""
    calls: int = 0
    generations: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    branches: list[str] = field(default_factory=list)
    sampled: int = 0
    trained: int = 0
    sequences: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        exact = f"{self.trained / self.sampled:.1%}" if self.sampled else "-"
        lost, labels = (
            ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "0"
            for counts in (self.lost, self.labels)
        )
        done = "yes" if self.completed else f"no: {self.why}"
        branches = f"{len(self.branches)} ({', '.join(self.branches)})" if self.branches else "0"
        calls, generations = str(self.calls), str(self.generations)
        begun = (self.harness, self.dialect, done, calls, generations, labels, branches)
        return (*begun, exact, str(self.sequences), lost)


def editing_task(
    harness: str, dialect: Dialect | None = None, limits: Limits = LIMITS, **options: Any
) -> Task:
    """Graded by the file it leaves."""
    given = {"provide": "mount", **options} | ({} if dialect is None else {"dialect": dialect.value})
    check = "grep -qx alpha notes.txt && grep -qx gamma notes.txt && ! grep -q beta notes.txt"
    return Task(
        instruction="Write alpha and beta to notes.txt, a line each. Then change beta to gamma, and check.",
        agent=AgentSpec(name=harness, options=given),
        tools=[],
        grader=GraderSpec(name="command", options={"command": check, "carry": ["/workspace"]}),
        limits=limits,
    )


@asynccontextmanager
async def service(harnesses: Path, folder: Path) -> AsyncIterator[str]:
    """``rollserve serve`` as a process on ``folder``; its URL."""
    processes = Processes(folder / "logs")
    port = processes.port()
    command = [
        *(sys.executable, "-m", "rollserve", "serve", "--port", str(port)),
        *("--data-dir", str(folder / "data"), "--set", f"workers.harness_dir={harnesses}"),
    ]
    try:
        url = f"http://127.0.0.1:{port}"
        await processes.wait_ready(processes.start("server", command), f"{url}/readyz", 60)
        yield url
    finally:
        processes.stop()


def editing_engine(script: Script | None = None, *, latency_s: float = 0.0) -> ScriptedEngine:
    """Follows the editing plan, a few tokens at a time."""
    script = script or follow(editing_plan())
    return ScriptedEngine(script, context_tokens=CONTEXT_TOKENS, chunk_tokens=8, latency_s=latency_s)


def breaking(harness: Harness, harnesses: Path, into: Path) -> None:
    """Of an installation, one whose program goes through ``harness_proxy``; hard links where they can be."""
    place = into / harness.folder
    shutil.copytree(harnesses / harness.folder, place, symlinks=True, copy_function=_linked)
    program = place / "bin" / harness.program
    program.rename(program.with_name(harness_proxy.REAL))
    shutil.copyfile(harness_proxy.__file__, program)
    program.chmod(0o755)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or somebody else's files
        shutil.copy2(source, target, follow_symlinks=False)


@asynccontextmanager
async def scripted_policy(client: Client, engine: ScriptedEngine | None = None) -> AsyncIterator[None]:
    """The policy ``POLICY``, which is sampled by ``engine``."""
    engine = engine or editing_engine()
    async with serving(ScriptedApp(engine)) as url:
        renderer = RendererSpec(name="qwen3", options={"enable_thinking": False})
        await client.create_policy(
            CreatePolicy(name=POLICY, model="scripted", tokenizer="tiny", renderer=renderer)
        )
        await client.register_backend(POLICY, RegisterBackend(url=url, kind=BackendKind.VLLM))
        yield


async def attempt(
    client: Client,
    harness: str,
    dialect: Dialect | None = None,
    *,
    sampling: SamplingSettings | None = None,
    limits: Limits = LIMITS,
    **options: Any,
) -> Trial:
    """One episode, from its submit to its samples; never longer than twice what the limits say."""
    retry = RetrySettings(max_attempts=1)
    run = await client.open_run(OpenRun(policy=POLICY, retry=retry, sampling=sampling or SamplingSettings()))
    await run.submit([editing_task(harness, dialect, limits, **options)], num_rollouts=1)
    async with asyncio.timeout(limits.run_s * 2):
        async with aclosing(run.groups(auto_ack=False)) as groups:
            group = await anext(groups)
            await group.ack()
    return await _judged(client, group, harness, dialect)


async def _judged(client: Client, group: FinishedGroup, harness: str, dialect: Dialect | None) -> Trial:
    (finished,) = group.rollouts
    rollout = finished.rollout
    made = await client.trajectory(rollout.id)
    last = (await client.rollout(rollout.id)).last_attempt
    calls: list[dict[str, Any]] = made["calls"]
    told = finished.tokens or _NOTHING
    failure = rollout.failure.message if rollout.failure is not None else f"reward {finished.reward}"
    return Trial(
        harness=harness,
        dialect=(dialect or next(iter(HARNESSES[harness].wires))).value,
        rollout=rollout.id,
        completed=finished.reward == 1.0,
        why="" if finished.reward == 1.0 else failure.replace("\n", " ")[:160],
        calls=len(calls),
        labels={label: of.calls for label, of in told.by_label.items() if label != "continuation"},
        branches=branches_of(calls),
        sampled=told.sampled,
        trained=sum(int(sample.loss_mask.sum()) for sample in finished.samples if sample.exact),
        sequences=len(finished.samples),
        lost=told.left_out,
        log=[line for _, line in await client.log(last.id)] if last is not None else [],
    )


def branches_of(calls: Sequence[dict[str, Any]]) -> list[str]:
    """Beginnings besides the first, and calls that share what they extend with another."""
    found: list[str] = []
    extended: set[str | None] = set()
    for call in calls:
        if call["parent"] in extended or (call["parent"] is None and extended):
            broke = call.get("broke")
            found.append(broke["cause"] if broke else "a beginning" if call["parent"] is None else "a fork")
        extended.add(call["parent"])
    return found


def table(trials: Sequence[Trial]) -> str:
    rows = [COLUMNS, *(trial.row() for trial in trials)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(widths[at]) for at, cell in enumerate(row)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


async def try_all(
    pairs: Sequence[tuple[str, Dialect]], harnesses: Path, trouble: Trouble | None, *, say_log: bool
) -> list[Trial]:
    """One after the other: a harness takes a core."""
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="rollserve-harnesses-") as folder:
        place = Path(folder)
        await asyncio.to_thread(place.chmod, 0o711)  # sandboxes run as another user
        if trouble is Trouble.CONNECTION:
            for name in dict(pairs):
                await asyncio.to_thread(breaking, HARNESSES[name], harnesses, place / "breaking")
            harnesses = place / "breaking"
        engine = editing_engine(latency_s=LATENCY_S if trouble is Trouble.CONNECTION else 0.0)
        async with (
            service(harnesses, place) as url,
            Client(url) as client,
            scripted_policy(client, engine),
        ):
            for name, dialect in pairs:
                _say(f"{name} ({dialect.value}) …")
                trial = await _troubled(client, engine, name, dialect, trouble)
                trials.append(trial)
                _say("  completed" if trial.completed else f"  failed: {trial.why}")
                if say_log or not trial.completed:
                    _say("".join(f"    {line}\n" for line in trial.log[-40:]))
    return trials


async def _troubled(
    client: Client, engine: ScriptedEngine, name: str, dialect: Dialect, trouble: Trouble | None
) -> Trial:
    options: dict[str, Any] = {}
    engine.faults.clear()
    if trouble is Trouble.BACKEND:
        engine.faults.extend(FAULTS)
    elif trouble is Trouble.CONNECTION:
        mark = "" if (name, trouble) in LEFT_OUT else MARK
        options["env"] = {"TRIAL_UPSTREAM": "{plain_url}", "TRIAL_MARK": mark}
    elif trouble is Trouble.COMPACTION:
        engine.script = follow_through(long_plan())
        options["context_tokens"], engine.context_tokens = WINDOWS[name]
        options["files"] = _SMALL.get(name, {})
        options["arguments"] = _GOES_ON.get(name, "")
    before = engine.started
    trial = await attempt(client, name, dialect, **options)
    trial.generations = engine.started - before
    return trial


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rollserve.testing.harness_trial", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(HARNESSES)}; none: those installed")
    parser.add_argument("--from", dest="folder", type=Path, required=True, help="the installed harnesses")
    parser.add_argument("--every-dialect", action="store_true", help="not the default one only")
    parser.add_argument("--trouble", type=Trouble, choices=list(Trouble), help="what befalls them on the way")
    parser.add_argument("--every-trouble", action="store_true", help="none, then each; a table of each")
    parser.add_argument("--log", action="store_true", help="show the log of each, not only of failures")
    options = parser.parse_args(argv)
    folder = options.folder.absolute()
    names = options.names or [
        name for name, row in HARNESSES.items() if (folder / row.folder / "bin" / row.program).exists()
    ]
    tried: list[Trial] = []
    for trouble in (None, *Trouble) if options.every_trouble else (options.trouble,):
        pairs = [
            (name, dialect)
            for name in names
            if trouble is not Trouble.COMPACTION or name in WINDOWS
            for dialect in list(HARNESSES[name].wires)[: None if options.every_dialect else 1]
        ]
        trials = asyncio.run(try_all(pairs, folder, trouble, say_log=options.log))
        tried += trials
        _say(f"\ntrouble: {trouble.value if trouble else 'none'}\n\n{table(trials)}")
        for name in names:
            if trouble is not None and (name, trouble) in LEFT_OUT:
                _say(f"{name}: {LEFT_OUT[name, trouble]}")
    sys.exit(0 if all(trial.completed for trial in tried) else 1)


if __name__ == "__main__":
    main()
