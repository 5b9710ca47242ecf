"""The handle of a run: submit, take groups, and look at what it found."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing

from rollserve.client.delivery import ExportedGroup, FinishedGroup, GroupStream, export
from rollserve.client.http import Transport, part
from rollserve.client.listing import pages
from rollserve.errors import InvalidInput
from rollserve.records.callback import CallbackMessage, CallbackMessageState, CallbackStatus
from rollserve.records.control import GroupRule
from rollserve.records.delivery import Checkpoint
from rollserve.records.evaluation import Comparison, Evaluation, TaskDifference, TaskResult
from rollserve.records.export import ExportSettings
from rollserve.records.regrade import JudgeRoute, Regrade
from rollserve.records.run import Run
from rollserve.records.task import GraderSpec, Task
from rollserve.wire import (
    BeginRegrade,
    GroupBody,
    GroupSummary,
    Resent,
    Rewound,
    RunClosed,
    RunStatus,
    Submitted,
)


def _evaluated(k: Sequence[int], threshold: float) -> dict[str, str]:
    return {"k": ",".join(map(str, k)), "threshold": repr(float(threshold))}


class RunHandle:
    """One run of a server."""

    def __init__(self, transport: Transport, run: Run) -> None:
        self._transport = transport
        self.run = run

    @property
    def id(self) -> str:
        return self.run.id

    async def submit(
        self,
        tasks: Sequence[Task],
        *,
        num_rollouts: int,
        rule: GroupRule | None = None,
        key: str | None = None,
    ) -> list[GroupSummary]:
        """A group for each task, all or none. ``rule`` says when they are over; else the run's does.
        Durable once this returns. ``key`` makes a repetition from another process safe; repetitions by
        this call are. Raises ``QueueFull`` when the run's bound is still reached after waiting, and
        ``InvalidInput`` for one task that is in no list."""
        if isinstance(tasks, Task):
            raise InvalidInput("submit takes a list of tasks, got one", field="tasks", hint="[task]")
        given = {"num_rollouts": num_rollouts} | ({"rule": rule} if rule else {})
        groups = [GroupBody.model_validate({"task": task, **given}) for task in tasks]
        body = {"groups": [group.model_dump(mode="json", exclude_unset=True) for group in groups]}
        raw = await self._transport.request(
            "POST",
            f"/v1/runs/{part(self.id)}/groups",
            body,
            headers={"Idempotency-Key": key or secrets.token_hex(16)},
        )
        return Submitted.model_validate_json(raw).groups

    async def groups(
        self,
        *,
        trainer: str = "default",
        epoch: int | None = None,
        prefetch: int = 4,
        ttl_s: float = 300.0,
        auto_ack: bool = True,
    ) -> AsyncGenerator[FinishedGroup, None]:
        """Finished groups as they come, until the run is closed or its task source has ended and all of
        it was acked. Raises ``RemoteError`` (``source_failed``) when the source fails. A group is acked
        when the next one is asked for; with ``auto_ack=False`` by ``await group.ack()``. ``epoch`` None is
        the trainer's of now; once it is rewound, this raises ``StaleEpoch``. Close the
        iterator (``aclosing``) to give back what was fetched ahead."""
        stream = GroupStream(
            self._transport, self.id, trainer=trainer, epoch=epoch, prefetch=prefetch, ttl_s=ttl_s
        )
        async with aclosing(stream.groups(auto_ack=auto_ack)) as groups:
            async for group in groups:
                yield group

    async def commit(
        self, name: str, *, epoch: int, trainer: str = "default", cursor: str | None = None
    ) -> Checkpoint:
        """What was acked so far is part of the trainer's checkpoint ``name``."""
        raw = await self._transport.request(
            "POST",
            f"/v1/runs/{part(self.id)}/trainers/{part(trainer)}/commit",
            {"name": name, "epoch": epoch, "cursor": cursor},
        )
        return Checkpoint.model_validate_json(raw)

    async def rewind(self, name: str | None = None, *, trainer: str = "default") -> Rewound:
        """Back to checkpoint ``name`` (None: the beginning): later groups are delivered again, the
        policy's version is set back, an old trainer is fenced."""
        raw = await self._transport.request(
            "POST",
            f"/v1/runs/{part(self.id)}/trainers/{part(trainer)}/rewind",
            {"name": name},
            repeatable=False,
        )
        return Rewound.model_validate_json(raw)

    async def resume_from(self, names: Sequence[str], *, trainer: str = "default") -> Rewound:
        """Rewind to the newest of the trainer's own checkpoints (``names``, oldest first) that was
        committed, or to the beginning: one that was written and not committed is passed over."""
        committed = {checkpoint.name for checkpoint in await self.checkpoints(trainer)}
        name = next((name for name in reversed(names) if name in committed), None)
        return await self.rewind(name, trainer=trainer)

    async def regrade(
        self,
        grader: GraderSpec,
        *,
        routes: Mapping[str, JudgeRoute | str] | None = None,
        key: str | None = None,
    ) -> Regrade:
        """Begin to grade the run's stored attempts once more. What they were graded before stays. The grader
        may ask ``routes``; None: those that the run has for graders."""
        asked = BeginRegrade.model_validate({"grader": grader, "routes": routes})
        body = asked.model_dump(mode="json")
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        path = f"/v1/runs/{part(self.id)}/regrades"
        raw = await self._transport.request("POST", path, body, headers=headers)
        return Regrade.model_validate_json(raw)

    async def regrades(self) -> list[Regrade]:
        path = f"/v1/runs/{part(self.id)}/regrades"
        return [Regrade.model_validate(item) async for item in pages(self._transport, path)]

    async def export(self, settings: ExportSettings | None = None) -> AsyncIterator[ExportedGroup]:
        """The run's groups with samples made anew from what was stored, by these settings; in the order of
        their submission."""
        async for group in export(self._transport, self.id, settings or ExportSettings()):
            yield group

    async def checkpoints(self, trainer: str = "default") -> list[Checkpoint]:
        path = f"/v1/runs/{part(self.id)}/trainers/{part(trainer)}/checkpoints"
        return [Checkpoint.model_validate(item) async for item in pages(self._transport, path)]

    async def evaluation(
        self, *, k: Sequence[int] = (1,), threshold: float = 1.0, confidence: float = 0.95
    ) -> Evaluation:
        """Mean reward and pass@k over its tasks. A rollout passes with ``threshold`` or more."""
        asked = _evaluated(k, threshold) | {"confidence": confidence}
        raw = await self._transport.request("GET", f"/v1/runs/{part(self.id)}/evaluation", params=asked)
        return Evaluation.model_validate_json(raw)

    async def evaluation_tasks(
        self, *, k: Sequence[int] = (1,), threshold: float = 1.0
    ) -> AsyncIterator[TaskResult]:
        """The same task by task, the worst first; all pages."""
        path = f"/v1/runs/{part(self.id)}/evaluation/tasks"
        async for item in pages(self._transport, path, **_evaluated(k, threshold)):
            yield TaskResult.model_validate(item)

    async def compare(
        self, other: str, *, k: Sequence[int] = (1,), threshold: float = 1.0, confidence: float = 0.95
    ) -> Comparison:
        """This run less the run ``other``, on the tasks that both have."""
        asked = _evaluated(k, threshold) | {"confidence": confidence, "other": other}
        raw = await self._transport.request(
            "GET", f"/v1/runs/{part(self.id)}/evaluation/compare", params=asked
        )
        return Comparison.model_validate_json(raw)

    async def compare_tasks(self, other: str) -> AsyncIterator[TaskDifference]:
        """The same task by task, what was lost most first; all pages."""
        path = f"/v1/runs/{part(self.id)}/evaluation/compare/tasks"
        async for item in pages(self._transport, path, other=other):
            yield TaskDifference.model_validate(item)

    async def callback(self) -> CallbackStatus:
        """Its callback, and its messages counted. Raises ``NotFound`` where it has none."""
        raw = await self._transport.request("GET", f"/v1/runs/{part(self.id)}/callback")
        return CallbackStatus.model_validate_json(raw)

    async def messages(self, state: CallbackMessageState | None = None) -> AsyncIterator[CallbackMessage]:
        """What its callback was sent or is to be sent; all pages."""
        path = f"/v1/runs/{part(self.id)}/callback/messages"
        async for item in pages(self._transport, path, state=state):
            yield CallbackMessage.model_validate(item)

    async def resend(self, ids: Sequence[str] | None = None) -> int:
        """Send dead messages (None: all) again; a stopped callback goes on. How many."""
        body = {} if ids is None else {"ids": list(ids)}
        raw = await self._transport.request("POST", f"/v1/runs/{part(self.id)}/callback/resend", body)
        return Resent.model_validate_json(raw).messages

    async def status(self) -> RunStatus:
        return RunStatus.model_validate_json(
            await self._transport.request("GET", f"/v1/runs/{part(self.id)}")
        )

    async def pause(self) -> Run:
        """Start no more of its rollouts; what runs goes on."""
        return Run.model_validate_json(
            await self._transport.request("POST", f"/v1/runs/{part(self.id)}/pause")
        )

    async def resume(self) -> Run:
        return Run.model_validate_json(
            await self._transport.request("POST", f"/v1/runs/{part(self.id)}/resume")
        )

    async def close(self) -> RunClosed:
        """No new groups; what is queued or running is cancelled. Final."""
        raw = await self._transport.request("POST", f"/v1/runs/{part(self.id)}/close")
        return RunClosed.model_validate_json(raw)

    async def prune(self) -> None:
        """Forget a closed run, payloads included."""
        await self._transport.request("DELETE", f"/v1/runs/{part(self.id)}")
