"""The API server of a cluster, through lightkube: tried again where that helps, its answers put in words.

What may be lost is asked for again: a pod that is there already was created by a try whose answer was lost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import msgspec
import yaml
from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError
from lightkube import ApiError, AsyncClient, Client
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError
from lightkube.resources.core_v1 import Pod
from lightkube.resources.networking_v1 import NetworkPolicy

from rollserve.backoff import backoff_s
from rollserve.cancelling import uninterrupted
from rollserve.errors import ConfigError, SandboxError
from rollserve.sandbox.kubernetes.pod import CONTAINER, SANDBOX_LABEL
from rollserve.sandbox.kubernetes.settings import KubernetesSettings

T = TypeVar("T")

REQUEST_TIMEOUT_S = 15.0
_LOOK_TIMEOUT_S = 1.8
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_EXECS_AT_ONCE, _REQUESTS_AT_ONCE = 64, 32
"""Together less than the connections that lightkube's client opens: beyond them a request fails."""

_PASSING = frozenset({429, 500, 502, 503, 504})
_NOT_BEGUN = frozenset({None, 429, 502, 503, 504})
"""Of an exec; 500 is what a pod that has ended says."""

_RIGHTS = (
    "rights needed in the namespace: create, get, list, delete pods; create, get pods/exec; get, create "
    "networkpolicies"
)

FAILURES = (
    *(httpx2.HTTPError, HTTPXWSException, KubeConfigError, msgspec.MsgspecError),
    *(KeyError, OSError, ExceptionGroup),
)
"""What lightkube raises; it lets its transport's errors, and answers that it can't read, through."""


@dataclass(frozen=True)
class Refusal:
    """``status`` is None when there was no answer. ``passing``: another try may do."""

    status: int | None
    reason: str
    message: str
    retry_after_s: float | None = None

    @property
    def passing(self) -> bool:
        """A quota's own object may be in the way of another request (409 ``Conflict``)."""
        return self.status is None or self.status in _PASSING or self.reason == "Conflict"

    def error(self, what: str, operation: str) -> SandboxError:
        if self.status is None:
            return SandboxError(
                f"{what}: the API server does not answer: {self.message}", operation=operation
            )
        hint = None
        if self.status == 401:
            hint = "the token or the kubeconfig is not valid (any more)"
        elif self.status == 403 and "quota" not in self.message:
            hint = _RIGHTS
        said = f"{what}: {self.status} {self.reason}: {self.message}".rstrip(": ")
        return SandboxError(said, operation=operation, hint=hint, retry_after_s=self.retry_after_s)


class _Status(msgspec.Struct):
    """What of Kubernetes' ``Status`` is read."""

    reason: str = ""
    message: str = ""


def refusal(error: BaseException) -> Refusal:
    """lightkube reads a ``Status`` only where nothing on the way has touched the answer's content type."""
    if isinstance(error, ApiError) and getattr(error, "response", None) is None:  # of an exec that had begun
        status = error.status
        return Refusal(status.code or 500, status.reason or "", status.message or "")
    response: httpx2.Response | None = None
    if isinstance(error, WebSocketUpgradeError | httpx2.HTTPStatusError):
        response = error.response
    if response is None:
        return Refusal(None, "", f"{type(error).__name__} {error}".strip())
    try:
        told = msgspec.json.decode(response.content, type=_Status)
    except (msgspec.MsgspecError, httpx2.StreamError):
        told = _Status(response.reason_phrase)
    return Refusal(response.status_code, told.reason, told.message, _retry_after_s(response))


def _retry_after_s(response: httpx2.Response) -> float | None:
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isdigit() else None


class ClusterApi:
    """The pods of one namespace. Blocking to make, as it reads files; raises ``ConfigError``."""

    def __init__(self, settings: KubernetesSettings) -> None:
        config = _config(settings)
        self.namespace = settings.namespace or config.namespace
        timeout = httpx2.Timeout(REQUEST_TIMEOUT_S)
        self._client = AsyncClient(config=config, namespace=self.namespace, timeout=timeout)
        self._execs = asyncio.Semaphore(_EXECS_AT_ONCE)
        self._requests = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def create(self, pod: Pod, *, until: float) -> None:
        """``until`` (``time.monotonic``) bounds the tries. A try that is given up is waited for, so that what
        it made can be removed. Raises ``SandboxError``."""
        tries = 0

        async def one() -> None:
            nonlocal tries
            tries += 1
            try:
                await uninterrupted(self._client.create(pod))
            except httpx2.HTTPStatusError as error:
                if tries == 1 or refusal(error).reason != "AlreadyExists":
                    raise

        await self._tried("the pod was not created", "sandbox.start", one, until)

    async def get(self, name: str, *, until: float) -> Pod | None:
        """None when there is none. Raises ``SandboxError``."""

        async def one() -> Pod | None:
            try:
                return await self._client.get(Pod, name)
            except httpx2.HTTPStatusError as error:
                if refusal(error).status == 404:
                    return None
                raise

        return await self._tried("the pod can't be looked at", "sandbox.look", one, until)

    async def delete(self, name: str, *, until: float) -> None:
        """Ask for its end; one that is not there is fine. Raises ``SandboxError``."""

        async def one() -> None:
            try:
                await self._client.delete(Pod, name)
            except httpx2.HTTPStatusError as error:
                if refusal(error).status != 404:
                    raise

        await self._tried("the pod was not deleted", "sandbox.close", one, until)

    async def sandboxes(self, *, until: float) -> list[Pod]:
        """Every pod of the namespace that is a sandbox, whosever. Raises ``SandboxError``."""

        async def one() -> list[Pod]:
            return [pod async for pod in self._client.list(Pod, labels={SANDBOX_LABEL: "true"})]

        return await self._tried("pods can't be listed", "sandbox.reap", one, until)

    async def see_to(self, policy: Mapping[str, Any], *, until: float) -> None:
        """See that a network policy is there; one that was changed by others is left. Raises
        ``SandboxError``."""

        async def one() -> None:
            try:
                await self._client.get(NetworkPolicy, policy["metadata"]["name"])
            except httpx2.HTTPStatusError as error:
                if refusal(error).status != 404:
                    raise
                await self._make(policy)

        await self._tried("the network policy was not made", "sandbox.start", one, until)

    async def _make(self, policy: Mapping[str, Any]) -> None:
        made = NetworkPolicy.from_dict(dict(policy))
        assert isinstance(made, NetworkPolicy)
        try:
            await self._client.create(made)
        except httpx2.HTTPStatusError as error:
            if refusal(error).reason != "AlreadyExists":  # another worker was quicker
                raise

    async def execute(
        self, name: str, command: Sequence[str], *, stdin: bytes | None, timeout_s: float
    ) -> bytes:
        """Its stdout. Only a call that did not begin is tried again. Raises one of ``FAILURES``."""
        until = time.monotonic() + timeout_s
        failures = 0
        while True:
            try:
                async with self._execs:
                    return await self._execute(name, command, stdin, timeout_s)
            except (WebSocketUpgradeError, httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                failures += 1
                wait_s = _wait_s(refusal(error), failures)
                if refusal(error).status not in _NOT_BEGUN or time.monotonic() + wait_s > until:
                    raise
            await asyncio.sleep(wait_s)

    async def _execute(
        self, name: str, command: Sequence[str], stdin: bytes | None, timeout_s: float
    ) -> bytes:
        answer = await self._client.exec(
            name,
            container=CONTAINER,
            command=list(command),
            stdin=stdin,
            stdout=True,
            stderr=True,
            decode=None,
            timeout=timeout_s,
        )
        return answer.stdout if isinstance(answer.stdout, bytes) else b""

    async def close(self) -> None:
        await self._client.close()

    async def _tried(self, what: str, operation: str, call: Callable[[], Awaitable[T]], until: float) -> T:
        failures = 0
        while True:
            try:
                async with self._requests:
                    return await call()
            except FAILURES as error:
                failures += 1
                told = refusal(error)
                wait_s = _wait_s(told, failures)
                if not told.passing or time.monotonic() + wait_s > until:
                    raise told.error(what, operation) from error
            await asyncio.sleep(wait_s)


def _wait_s(told: Refusal, failures: int) -> float:
    return told.retry_after_s or backoff_s(failures, _FIRST_WAIT_S, _LONGEST_WAIT_S, jitter=random.random())


def _config(settings: KubernetesSettings) -> SingleConfig:
    """Raises ``ConfigError``."""
    try:
        known = KubeConfig.from_file(settings.kubeconfig) if settings.kubeconfig else KubeConfig.from_env()
        chosen = known.get(settings.context or None)
    except (KubeConfigError, KeyError, TypeError, msgspec.MsgspecError, yaml.YAMLError, OSError) as error:
        raise ConfigError(f"no way to a cluster: {error}", field="kubernetes.kubeconfig") from error
    if chosen is None or chosen.user is None:
        raise ConfigError("the context names no user", field="kubernetes.context")
    return chosen


@dataclass(frozen=True)
class Sight:
    """What a look at the cluster found: ``problem`` is empty when the namespace's pods can be listed."""

    server: str = ""
    namespace: str = ""
    problem: str = ""


def look(settings: KubernetesSettings) -> Sight:
    """Blocking, for less than two seconds."""
    try:
        config = _config(settings)
    except ConfigError as error:
        return Sight(problem=error.message)
    namespace = settings.namespace or config.namespace
    timeout = httpx2.Timeout(_LOOK_TIMEOUT_S)
    try:
        with Client(config=config, namespace=namespace, timeout=timeout) as client:
            next(iter(client.list(Pod, labels={SANDBOX_LABEL: "true"}, chunk_size=1)), None)
    except FAILURES as error:
        told = refusal(error).error(f"namespace {namespace} of {config.cluster.server}", "sandbox.look")
        return Sight(config.cluster.server, namespace, str(told))
    return Sight(config.cluster.server, namespace)
