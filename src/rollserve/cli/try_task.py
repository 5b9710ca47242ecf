"""``rollserve try``: one rollout in this process, shown while it happens.

The model is a policy of a running server, or any inference server by URL; sandbox, tools, agent and
grader are this machine's. With ``--shell`` the sandbox is kept when the rollout has no reward, and
commands can be typed into it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollserve.addresses import checked_root
from rollserve.build.probes import check_tokenizer, probe
from rollserve.build.worker import Workplace, open_workplace, stage_slots
from rollserve.cli.connect import connect
from rollserve.cli.options import Where
from rollserve.cli.output import err, fail, first_line, out, print_json
from rollserve.cli.show import print_message
from rollserve.config import Settings, load
from rollserve.errors import InvalidInput, UnknownName
from rollserve.executor.base import BackendReport, FromWorker, PolicyView, StartAttempt
from rollserve.gateway.rendering import check_renderer
from rollserve.records.call import Call, Message
from rollserve.records.policy import Backend, BackendKind, BackendSpec, Policy, PolicySpec, RendererSpec
from rollserve.records.rollout import Attempt, Stage
from rollserve.records.run import RunSpec, SamplingSettings
from rollserve.records.task import Task
from rollserve.rollouts.attempt import AttemptRunner
from rollserve.rollouts.policies import backend_json
from rollserve.rollouts.stages import StagePools
from rollserve.rollouts.worker_ports import Keeper
from rollserve.sandbox.base import Sandbox
from rollserve.store.payload import EndState, SealedPayload, Segment

KEEP_S = 24 * 3600.0
PROMPT = "sandbox> "
_SHOWN_OTHERWISE = ("stage: ", "ended: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the model is: ``policy`` of the server at ``where``, or ``backend`` with its details."""

    where: Where
    policy: str | None
    backend: str | None
    kind: str
    model: str | None
    tokenizer: str | None
    renderer: str
    renderer_options: dict[str, Any]
    temperature: float


async def _from_server(target: Target, name: str) -> tuple[Policy, list[Backend]]:
    async with connect(target.where) as client:
        policy, backends = await client.policy(name), await client.backends(name)
    if any(backend.spec.api_key is not None for backend in backends):
        raise InvalidInput(
            f"a backend of {name!r} wants a key, which the server does not hand out",
            hint="name the inference server itself: --backend URL --model NAME --tokenizer DIR",
        )
    await _check_readable(policy.spec)
    return policy, backends


async def _check_readable(spec: PolicySpec) -> None:
    """Before anything starts: the tokenizer is read on this machine. Raises ``InvalidInput``."""
    if spec.interface == "tokens":
        await asyncio.to_thread(check_renderer, spec.renderer)
        if spec.tokenizer is not None:
            await check_tokenizer(spec.tokenizer)


async def _from_backend(target: Target, url: str) -> tuple[Policy, list[Backend]]:
    if target.kind not in list(BackendKind):
        raise UnknownName("kind", target.kind, list(BackendKind), field="kind", list_all=True)
    spec = BackendSpec(url=checked_root(url), kind=BackendKind(target.kind))
    if not target.model or (not target.tokenizer and spec.kind.interface != "text"):
        raise InvalidInput("--backend needs --model and --tokenizer too")
    renderer = RendererSpec(name=target.renderer, options=target.renderer_options)
    policy = Policy(
        spec=PolicySpec(
            name="try",
            model=target.model,
            tokenizer=target.tokenizer,
            interface=spec.kind.interface,
            renderer=renderer,
        )
    )
    await _check_readable(policy.spec)
    info = await probe(spec, target.model)
    return policy, [Backend(id="be_try", policy="try", spec=spec, info=info)]


async def find_model(target: Target) -> tuple[Policy, list[Backend]]:
    """Raises ``InvalidInput`` when the flags name no model."""
    if target.policy and not target.backend:
        return await _from_server(target, target.policy)
    if target.backend and not target.policy:
        return await _from_backend(target, target.backend)
    raise InvalidInput(
        "name the model: --policy NAME (of a running server), or --backend URL --model NAME --tokenizer DIR"
    )


class LiveSegment:
    """Passes everything on, and shows it on the way."""

    def __init__(self, inner: Segment, *, quiet: bool) -> None:
        self._inner = inner
        self._quiet = quiet

    def append_call(self, call: Call) -> None:
        self._inner.append_call(call)
        if self._quiet:
            return
        for message in (*call.messages, call.reply):
            print_message(_plain(message))
        sampled = len(call.sampled_ids) // 4
        out.print(f"    {sampled} tokens, {call.finished_at - call.started_at:.2f} s", style="dim")

    def append_log(self, line: str) -> None:
        self._inner.append_log(line)
        if not self._quiet and line.strip() and not line.startswith(_SHOWN_OTHERWISE):
            err.print(f"· {line}", style="dim", markup=False, soft_wrap=True)

    def append_artifact(self, path: str, data: bytes) -> None:
        self._inner.append_artifact(path, data)

    def append_call_rewards(self, rewards: dict[str, float]) -> None:
        self._inner.append_call_rewards(rewards)

    def append_end(self, end: EndState) -> None:
        self._inner.append_end(end)

    async def seal(self) -> SealedPayload:
        return await self._inner.seal()

    def leave(self) -> None:
        self._inner.leave()

    def discard(self) -> None:
        self._inner.discard()


def _plain(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(message)
    return {"role": message.role, **data}


class Observer:
    """Says which stage it is in; ``keep`` holds the sandbox that is to be looked at."""

    def __init__(self, *, quiet: bool) -> None:
        self.kept: Sandbox | None = None
        self._quiet = quiet

    def stage_changed(self, attempt_id: str, stage: Stage) -> None:
        if not self._quiet:
            err.print(f"— {stage.value}", style="bold")

    def count(self, counter: str, by: float = 1) -> None:
        """Nobody counts here."""

    def keep(self, sandbox: Sandbox) -> None:
        self.kept = sandbox

    def close_later(self, sandboxes: Sequence[Sandbox], closed: Callable[[], None]) -> None:
        """Their runtime closes them, right after this one attempt."""
        closed()


def _start(task: Task, policy: Policy, target: Target) -> StartAttempt:
    run = RunSpec(policy=policy.spec.name, sampling=SamplingSettings(temperature=target.temperature))
    return StartAttempt(
        attempt_id="att_try",
        rollout_id="rol_try",
        group_id="grp_try",
        run_id="run_try",
        index=0,
        epoch=1,
        run_json=run.model_dump_json().encode(),
        task_json=task.model_dump_json().encode(),
    )


async def _shell(sandbox: Sandbox, timeout_s: float) -> None:
    """Lines from the terminal into the sandbox's own shell, until end of file or ``exit``."""
    err.print(f"the sandbox is kept; type commands, `exit` or Ctrl-D to leave ({sandbox.id})")
    while True:
        err.print(PROMPT, end="")
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line or line.strip() == "exit":
            return
        result = await sandbox.exec(line, timeout_s=timeout_s)
        out.print(result.output, end="", markup=False)
        if result.timed_out or result.exit_code:
            err.print(f"[{'killed: too long' if result.timed_out else f'exit code {result.exit_code}'}]")


async def _play(
    place: Workplace, settings: Settings, start: StartAttempt, *, keep: bool, quiet: bool
) -> Attempt | None:
    observer = Observer(quiet=quiet)
    runner = AttemptRunner(
        start,
        LiveSegment(place.ports.payloads.open_segment(start.run_id, start.attempt_id), quiet=quiet),
        worker_id="try",
        ports=place.ports,
        pools=StagePools(stage_slots(settings)),
        observer=observer,
        keeper=Keeper(take=observer.keep, seconds=KEEP_S) if keep else None,
    )
    attempt = await runner.run()
    if observer.kept is not None:
        earned = attempt is not None and (attempt.reward or 0.0) > 0
        try:
            if not earned:
                await _shell(observer.kept, start.task().limits.command_s)
        finally:
            await observer.kept.close()
    return attempt


async def try_task(
    task: Task,
    target: Target,
    *,
    config: Path | None,
    overrides: dict[str, Any],
    shell: bool,
    as_json: bool,
) -> int:
    """Exit code 0 when the rollout was graded."""
    with tempfile.TemporaryDirectory(prefix="rollserve-try-") as folder:
        settings = _in(Path(folder), load(config=config, overrides=overrides))
        policy, backends = await find_model(target)
        view = PolicyView(
            revision=time.time_ns(),
            policy_json=policy.model_dump_json().encode(),
            backends_json=[backend_json(backend) for backend in backends],
        )
        async with open_workplace(settings, tell=_tell) as place:
            await place.catalogs.check_task(task, "")
            _warn(place, task)
            place.gateway.update_policy(view)
            attempt = await _play(place, settings, _start(task, policy, target), keep=shell, quiet=as_json)
    return _conclude(attempt, as_json=as_json)


def _in(folder: Path, settings: Settings) -> Settings:
    """All is written to ``folder`` but images and harnesses: those stay where a server keeps them, for the
    next try."""
    images = settings.images.model_copy(update={"dir": settings.image_folder})
    workers = settings.workers.model_copy(update={"harness_dir": settings.harness_folder})
    return settings.model_copy(update={"data_dir": folder, "images": images, "workers": workers})


def _warn(place: Workplace, task: Task) -> None:
    report = place.catalogs.runtimes[task.runtime or place.catalogs.default_runtime].report()
    if not report.isolated:
        err.print(f"UNSAFE: the runtime {report.name!r} isolates nothing; what the model writes runs as you")


def _tell(message: FromWorker) -> None:
    """A model that does not answer must not look like a model that thinks."""
    if isinstance(message, BackendReport):
        state = "answers again" if message.ok else f"does not answer: {message.detail}"
        err.print(f"· the backend {state}", style="yellow", markup=False)


def _conclude(attempt: Attempt | None, *, as_json: bool) -> int:
    if attempt is None:
        fail("the rollout was abandoned")
        return 1
    if as_json:
        print_json(attempt.model_dump(mode="json"))
    else:
        failure = attempt.failure  # the log, which was shown, has all of it
        what = f"reward {attempt.reward}" if failure is None else first_line(failure.message)
        kind = "" if attempt.failure is None else f" ({attempt.failure.kind.value})"
        mark = f", truncated by {attempt.truncated_by}" if attempt.truncated_by else ""
        out.print(
            f"{attempt.outcome and attempt.outcome.value}{kind}: {what}{mark}", style="bold", markup=False
        )
    return 0 if attempt.failure is None else 1
