"""``Client`` and the handle of a run."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import msgspec
from pydantic import BaseModel

from rollserve.client.delivery import FinishedGroup, GroupStream
from rollserve.client.http import Transport, to_error
from rollserve.client.updates import UpdateHandle, Updates, updating
from rollserve.errors import QueueFull, Unavailable
from rollserve.records.control import GroupRule
from rollserve.records.delivery import Checkpoint
from rollserve.records.drift import RolloutDrift
from rollserve.records.event import Event
from rollserve.records.policy import Backend, Policy
from rollserve.records.rollout import Attempt, Rollout
from rollserve.records.run import Run
from rollserve.records.sample import Sample
from rollserve.records.task import Task
from rollserve.records.update import UpdateMode
from rollserve.records.verification import Verification
from rollserve.wire import (
    Cancelled,
    CreatePolicy,
    GroupBody,
    GroupStatus,
    GroupSummary,
    Listing,
    OpenRun,
    RegisterBackend,
    Rewound,
    RolloutStatus,
    RunStatus,
    ServerStatus,
    Submitted,
    WireSample,
    from_wire,
)

PAGE = 500


def _plain(model: BaseModel) -> dict[str, Any]:
    """JSON-compatible data; secrets are sent as what they are."""
    data = model.model_dump(mode="json", exclude_unset=True)
    key = getattr(model, "api_key", None)
    if key is not None:
        data["api_key"] = key.get_secret_value()
    return data


async def pages(transport: Transport, path: str, **params: str | int | None) -> AsyncIterator[Any]:
    """The items of a list, page after page."""
    cursor: str | None = None
    while True:
        raw = await transport.request("GET", path, params={"limit": PAGE, **params, "cursor": cursor})
        page = Listing[Any].model_validate_json(raw)
        for item in page.items:
            yield item
        cursor = page.next
        if cursor is None:
            return


class Client:
    """A server, by URL. ``timeout_s`` bounds one request (long polls included), ``patience_s`` the time
    for which a request that may be sent again is, while the server is busy or away."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8700",
        api_key: str | None = None,
        *,
        timeout_s: float = 120,
        patience_s: float = 60,
    ):
        self._transport = Transport(url, api_key, timeout_s=timeout_s, patience_s=patience_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    # -- policies

    async def create_policy(self, spec: CreatePolicy) -> Policy:
        """The same spec again is a no-op; another spec under the name raises ``Conflict``."""
        return Policy.model_validate_json(await self._transport.request("POST", "/v1/policies", _plain(spec)))

    async def policy(self, name: str) -> Policy:
        return Policy.model_validate_json(await self._transport.request("GET", f"/v1/policies/{name}"))

    async def set_version(self, policy: str, version: int, label: str | None = None) -> Policy:
        """Announce that the policy's backends now serve ``version``."""
        body = {"version": version} | ({"label": label} if label else {})
        return Policy.model_validate_json(
            await self._transport.request("POST", f"/v1/policies/{policy}/version", body)
        )

    def updates(self, policy: str) -> Updates:
        """Each step of an update of its weights by itself; ``updating`` does them in order."""
        return Updates(self._transport, policy)

    @asynccontextmanager
    async def updating(
        self, policy: str, *, mode: UpdateMode = UpdateMode.DRAIN, lease_s: float = 300.0
    ) -> AsyncIterator[UpdateHandle]:
        """``async with client.updating("p") as update: …; await update.commit(version)``: inside, the
        policy's backends are paused. Left without a commit, they go on as they were."""
        async with updating(self.updates(policy), mode, lease_s) as handle:
            yield handle

    async def pause_policy(self, policy: str) -> None:
        await self._transport.request("POST", f"/v1/policies/{policy}/pause")

    async def resume_policy(self, policy: str) -> None:
        await self._transport.request("POST", f"/v1/policies/{policy}/resume")

    async def register_backend(self, policy: str, spec: RegisterBackend) -> Backend:
        """The server probes it first. Raises ``InvalidInput`` when it is no such backend or serves
        another model."""
        return Backend.model_validate_json(
            await self._transport.request("POST", f"/v1/policies/{policy}/backends", _plain(spec))
        )

    async def backends(self, policy: str) -> list[Backend]:
        path = f"/v1/policies/{policy}/backends"
        return [Backend.model_validate(item) async for item in pages(self._transport, path)]

    async def drain_backend(self, policy: str, backend_id: str) -> None:
        await self._transport.request("POST", f"/v1/policies/{policy}/backends/{backend_id}/drain")

    async def remove_backend(self, policy: str, backend_id: str) -> None:
        await self._transport.request("DELETE", f"/v1/policies/{policy}/backends/{backend_id}")

    # -- runs

    async def open_run(self, spec: OpenRun, *, key: str | None = None) -> RunHandle:
        """``key`` makes the request safe to send again from another process."""
        raw = await self._transport.request(
            "POST", "/v1/runs", _plain(spec), headers={"Idempotency-Key": key or secrets.token_hex(16)}
        )
        return RunHandle(self._transport, Run.model_validate_json(raw))

    async def run(self, run_id: str) -> RunHandle:
        raw = await self._transport.request("GET", f"/v1/runs/{run_id}")
        return RunHandle(self._transport, RunStatus.model_validate_json(raw).run)

    async def runs(self) -> list[Run]:
        return [Run.model_validate(item) async for item in pages(self._transport, "/v1/runs")]

    # -- rollouts

    async def rollout(self, rollout_id: str) -> RolloutStatus:
        return RolloutStatus.model_validate_json(
            await self._transport.request("GET", f"/v1/rollouts/{rollout_id}")
        )

    async def rollouts(self, **filters: str | int | None) -> AsyncIterator[Rollout]:
        """``run_id``, ``group_id``, ``state``; all pages."""
        async for item in pages(self._transport, "/v1/rollouts", **filters):
            yield Rollout.model_validate(item)

    async def attempts(self, rollout_id: str) -> AsyncIterator[Attempt]:
        """Every try, the first one first; all pages."""
        async for item in pages(self._transport, f"/v1/rollouts/{rollout_id}/attempts"):
            yield Attempt.model_validate(item)

    async def trajectory(self, rollout_id: str) -> dict[str, Any]:
        raw = await self._transport.request("GET", f"/v1/rollouts/{rollout_id}/trajectory")
        return msgspec.json.decode(raw, type=dict[str, Any])

    async def samples(self, rollout_id: str) -> list[Sample]:
        raw = await self._transport.request("GET", f"/v1/rollouts/{rollout_id}/samples", msgpack=True)
        return [from_wire(item) for item in msgspec.msgpack.decode(raw, type=list[WireSample])]

    async def drift(self, run_id: str, *, cause: str | None = None) -> AsyncIterator[RolloutDrift]:
        """Where the tokens of the run's rollouts differ from what was sent or consumed; all pages."""
        async for item in pages(self._transport, f"/v1/runs/{run_id}/drift", cause=cause):
            yield RolloutDrift.model_validate(item)

    async def rollout_drift(self, rollout_id: str) -> AsyncIterator[dict[str, Any]]:
        """Each place where a call of its newest attempt drifted; all pages."""
        async for item in pages(self._transport, f"/v1/rollouts/{rollout_id}/drift"):
            yield item

    async def verify(self, rollout_id: str, **asked: str | float | bool | None) -> Verification:
        """Check its samples: ``score``, ``backend_id``, ``max_difference``, ``mean_difference``."""
        params = {name: str(each).lower() if isinstance(each, bool) else each for name, each in asked.items()}
        path = f"/v1/rollouts/{rollout_id}/verify"
        return Verification.model_validate_json(await self._transport.request("POST", path, params=params))

    async def log(self, attempt_id: str) -> list[tuple[float, str]]:
        path = f"/v1/attempts/{attempt_id}/log"
        return [(float(at), str(line)) async for at, line in pages(self._transport, path)]

    async def group(self, group_id: str) -> GroupStatus:
        """With its rollouts counted; ``rollouts(group_id=…)`` are they."""
        return GroupStatus.model_validate_json(await self._transport.request("GET", f"/v1/groups/{group_id}"))

    async def cancel_rollout(self, rollout_id: str) -> Cancelled:
        return Cancelled.model_validate_json(
            await self._transport.request("POST", f"/v1/rollouts/{rollout_id}/cancel")
        )

    async def cancel_group(self, group_id: str) -> Cancelled:
        return Cancelled.model_validate_json(
            await self._transport.request("POST", f"/v1/groups/{group_id}/cancel")
        )

    async def status(self) -> ServerStatus:
        return ServerStatus.model_validate_json(await self._transport.request("GET", "/v1/status"))

    async def events(self, *, after: int = 0, run_id: str | None = None) -> AsyncIterator[Event]:
        """Events from the cursor ``after`` on, for ever; a broken connection is taken up where it
        was. Raises what the server refuses them with."""
        delay_s = 0.2
        while True:
            try:
                async for event in self._event_stream(after, run_id):
                    after, delay_s = event.seq, 0.2
                    yield event
            except (QueueFull, Unavailable):
                delay_s = min(10.0, delay_s * 2)
            await asyncio.sleep(delay_s)

    async def _event_stream(self, after: int, run_id: str | None) -> AsyncIterator[Event]:
        import aiohttp

        params = {"after": str(after)} | ({"run_id": run_id} if run_id else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
        try:
            async with self._transport.session.get(
                f"{self._transport.url}/v1/events", params=params, timeout=timeout
            ) as answer:
                if answer.status >= 400:
                    raise to_error(answer.status, await answer.read(), answer.headers.get("Retry-After"))
                async for line in answer.content:
                    if line.startswith(b"data:"):
                        yield Event.model_validate_json(line[5:].strip())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"event stream broke: {error}") from error


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
        this call are. Raises ``QueueFull`` when the run's
        bound is still reached after waiting."""
        given = {"num_rollouts": num_rollouts} | ({"rule": rule} if rule else {})
        groups = [GroupBody.model_validate({"task": task, **given}) for task in tasks]
        body = {"groups": [group.model_dump(mode="json", exclude_unset=True) for group in groups]}
        raw = await self._transport.request(
            "POST",
            f"/v1/runs/{self.id}/groups",
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
        when the next one is asked for; with ``auto_ack=False`` by ``await group.ack()``. Close the
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
            f"/v1/runs/{self.id}/trainers/{trainer}/commit",
            {"name": name, "epoch": epoch, "cursor": cursor},
        )
        return Checkpoint.model_validate_json(raw)

    async def rewind(self, name: str | None = None, *, trainer: str = "default") -> Rewound:
        """Back to checkpoint ``name`` (None: the beginning): later groups are delivered again, the
        policy's version is set back, an old trainer is fenced."""
        raw = await self._transport.request(
            "POST", f"/v1/runs/{self.id}/trainers/{trainer}/rewind", {"name": name}, repeatable=False
        )
        return Rewound.model_validate_json(raw)

    async def checkpoints(self, trainer: str = "default") -> list[Checkpoint]:
        path = f"/v1/runs/{self.id}/trainers/{trainer}/checkpoints"
        return [Checkpoint.model_validate(item) async for item in pages(self._transport, path)]

    async def status(self) -> RunStatus:
        return RunStatus.model_validate_json(await self._transport.request("GET", f"/v1/runs/{self.id}"))

    async def pause(self) -> None:
        await self._transport.request("POST", f"/v1/runs/{self.id}/pause")

    async def resume(self) -> None:
        await self._transport.request("POST", f"/v1/runs/{self.id}/resume")

    async def close(self) -> None:
        """No new groups; what is queued or running is cancelled. Final."""
        await self._transport.request("POST", f"/v1/runs/{self.id}/close")

    async def prune(self) -> None:
        """Forget a closed run, payloads included."""
        await self._transport.request("DELETE", f"/v1/runs/{self.id}")
