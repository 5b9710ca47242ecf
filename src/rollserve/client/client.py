"""``Client``: one server, its policies, runs and rollouts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import msgspec

from rollserve.client.callbacks import Callback, read_callback
from rollserve.client.http import Transport, part, to_error
from rollserve.client.listing import pages, plain
from rollserve.client.runs import RunHandle
from rollserve.client.updates import UpdateHandle, Updates, updating
from rollserve.errors import QueueFull, Unavailable
from rollserve.records.drift import RolloutDrift
from rollserve.records.event import Event
from rollserve.records.policy import Backend, Policy
from rollserve.records.regrade import Regrading
from rollserve.records.rollout import Attempt, Rollout
from rollserve.records.run import Run, RunState
from rollserve.records.sample import Sample
from rollserve.records.update import UpdateMode
from rollserve.records.verification import Verification
from rollserve.wire import (
    Cancelled,
    CreatePolicy,
    GroupStatus,
    Listing,
    OpenRun,
    RegisterBackend,
    RegradeCancelled,
    RegradeStatus,
    RolloutStatus,
    RunStatus,
    ServerStatus,
    WireSample,
    from_wire,
)


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
        return Policy.model_validate_json(await self._transport.request("POST", "/v1/policies", plain(spec)))

    async def policy(self, name: str) -> Policy:
        return Policy.model_validate_json(await self._transport.request("GET", f"/v1/policies/{part(name)}"))

    async def policies(self, *, cursor: str | None = None, limit: int = 100) -> Listing[Policy]:
        """One page, by name; ``cursor`` is ``next`` of the page before."""
        raw = await self._transport.request("GET", "/v1/policies", params={"cursor": cursor, "limit": limit})
        return Listing[Policy].model_validate_json(raw)

    async def set_version(self, policy: str, version: int, label: str | None = None) -> Policy:
        """Announce that the policy's backends now serve ``version``."""
        body = {"version": version} | ({"label": label} if label else {})
        return Policy.model_validate_json(
            await self._transport.request("POST", f"/v1/policies/{part(policy)}/version", body)
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

    async def pause_policy(self, policy: str) -> Policy:
        return Policy.model_validate_json(
            await self._transport.request("POST", f"/v1/policies/{part(policy)}/pause")
        )

    async def resume_policy(self, policy: str) -> Policy:
        return Policy.model_validate_json(
            await self._transport.request("POST", f"/v1/policies/{part(policy)}/resume")
        )

    async def register_backend(self, policy: str, spec: RegisterBackend) -> Backend:
        """The server probes it first. Raises ``InvalidInput`` when it is no such backend or serves
        another model."""
        return Backend.model_validate_json(
            await self._transport.request("POST", f"/v1/policies/{part(policy)}/backends", plain(spec))
        )

    async def backends(self, policy: str) -> list[Backend]:
        path = f"/v1/policies/{part(policy)}/backends"
        return [Backend.model_validate(item) async for item in pages(self._transport, path)]

    async def drain_backend(self, policy: str, backend_id: str) -> None:
        await self._transport.request(
            "POST", f"/v1/policies/{part(policy)}/backends/{part(backend_id)}/drain"
        )

    async def remove_backend(self, policy: str, backend_id: str) -> None:
        await self._transport.request("DELETE", f"/v1/policies/{part(policy)}/backends/{part(backend_id)}")

    # -- runs

    async def open_run(self, spec: OpenRun, *, key: str | None = None) -> RunHandle:
        """``key`` makes the request safe to send again from another process."""
        raw = await self._transport.request(
            "POST", "/v1/runs", plain(spec), headers={"Idempotency-Key": key or secrets.token_hex(16)}
        )
        return RunHandle(self._transport, Run.model_validate_json(raw))

    def callback(self, secret: str, headers: Mapping[str, str], body: bytes) -> Callback:
        """What a run's callback was sent, once its signature is checked. Ack each of its groups before
        answering (any 2xx), and keep it only then; a message may come twice, under the same ``id``. Raises
        ``Unauthenticated``, ``InvalidInput``."""
        return read_callback(self._transport, secret, headers, body)

    async def run(self, run_id: str) -> RunHandle:
        raw = await self._transport.request("GET", f"/v1/runs/{part(run_id)}")
        return RunHandle(self._transport, RunStatus.model_validate_json(raw).run)

    async def runs(
        self,
        *,
        state: RunState | None = None,
        newest: bool = False,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Listing[Run]:
        """One page, in the order they were opened or the ``newest`` first; ``cursor`` is ``next`` of the
        page before."""
        asked = {"state": state, "newest": "true" if newest else None, "cursor": cursor, "limit": limit}
        raw = await self._transport.request("GET", "/v1/runs", params=asked)
        return Listing[Run].model_validate_json(raw)

    # -- rollouts

    async def rollout(self, rollout_id: str) -> RolloutStatus:
        return RolloutStatus.model_validate_json(
            await self._transport.request("GET", f"/v1/rollouts/{part(rollout_id)}")
        )

    async def rollouts(self, **filters: str | int | None) -> AsyncIterator[Rollout]:
        """``run_id``, ``group_id``, ``state``; all pages."""
        async for item in pages(self._transport, "/v1/rollouts", **filters):
            yield Rollout.model_validate(item)

    async def attempts(self, rollout_id: str) -> AsyncIterator[Attempt]:
        """Every try, the first one first; all pages."""
        async for item in pages(self._transport, f"/v1/rollouts/{part(rollout_id)}/attempts"):
            yield Attempt.model_validate(item)

    async def trajectory(self, rollout_id: str) -> dict[str, Any]:
        raw = await self._transport.request("GET", f"/v1/rollouts/{part(rollout_id)}/trajectory")
        return msgspec.json.decode(raw, type=dict[str, Any])

    async def samples(self, rollout_id: str) -> list[Sample]:
        raw = await self._transport.request("GET", f"/v1/rollouts/{part(rollout_id)}/samples", msgpack=True)
        return [from_wire(item) for item in msgspec.msgpack.decode(raw, type=list[WireSample])]

    async def drift(self, run_id: str, *, cause: str | None = None) -> AsyncIterator[RolloutDrift]:
        """Where the tokens of the run's rollouts differ from what was sent or consumed; all pages."""
        async for item in pages(self._transport, f"/v1/runs/{part(run_id)}/drift", cause=cause):
            yield RolloutDrift.model_validate(item)

    async def rollout_drift(self, rollout_id: str) -> AsyncIterator[dict[str, Any]]:
        """Each place where a call of its newest attempt drifted; all pages."""
        async for item in pages(self._transport, f"/v1/rollouts/{part(rollout_id)}/drift"):
            yield item

    async def verify(self, rollout_id: str, **asked: str | float | bool | None) -> Verification:
        """Check its samples: ``score``, ``backend_id``, ``max_difference``, ``mean_difference``."""
        params = {name: str(each).lower() if isinstance(each, bool) else each for name, each in asked.items()}
        path = f"/v1/rollouts/{part(rollout_id)}/verify"
        return Verification.model_validate_json(await self._transport.request("POST", path, params=params))

    async def log(self, attempt_id: str) -> list[tuple[float, str]]:
        path = f"/v1/attempts/{part(attempt_id)}/log"
        return [(float(at), str(line)) async for at, line in pages(self._transport, path)]

    async def regrade(self, regrade_id: str) -> RegradeStatus:
        return RegradeStatus.model_validate_json(
            await self._transport.request("GET", f"/v1/regrades/{part(regrade_id)}")
        )

    async def gradings(self, regrade_id: str, *, state: str | None = None) -> AsyncIterator[Regrading]:
        """All pages."""
        async for item in pages(self._transport, f"/v1/regrades/{part(regrade_id)}/gradings", state=state):
            yield Regrading.model_validate(item)

    async def cancel_regrade(self, regrade_id: str) -> int:
        """How many gradings will not be made."""
        raw = await self._transport.request("POST", f"/v1/regrades/{part(regrade_id)}/cancel")
        return RegradeCancelled.model_validate_json(raw).cancelled

    async def group(self, group_id: str) -> GroupStatus:
        """With its rollouts counted; ``rollouts(group_id=…)`` are they."""
        return GroupStatus.model_validate_json(
            await self._transport.request("GET", f"/v1/groups/{part(group_id)}")
        )

    async def cancel_rollout(self, rollout_id: str) -> Cancelled:
        return Cancelled.model_validate_json(
            await self._transport.request("POST", f"/v1/rollouts/{part(rollout_id)}/cancel")
        )

    async def cancel_group(self, group_id: str) -> Cancelled:
        return Cancelled.model_validate_json(
            await self._transport.request("POST", f"/v1/groups/{part(group_id)}/cancel")
        )

    async def status(self) -> ServerStatus:
        return ServerStatus.model_validate_json(await self._transport.request("GET", "/v1/status"))

    async def events(self, *, after: int = 0, run_id: str | None = None) -> AsyncGenerator[Event, None]:
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
