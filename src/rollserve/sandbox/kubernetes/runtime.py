"""Runtime ``kubernetes``: each sandbox is a pod, made through the API and acted in by exec.

Shells, programs and files are the agent's of ``sandbox.remote``, which the image brings nothing for. Labels
say whose a pod is: the folder of workers (an id kept in it), the worker (its own folder in there is locked as
long as it lives), and when its time is over. ``reap`` removes those whose worker is gone, those of this
worker that nobody holds (an API server may carry out what was given up), and, whoever made them, those past
their time. Tried against a server of our own that plays the API, with no cluster.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rollserve import installing
from rollserve.cancelling import uninterrupted
from rollserve.errors import ConfigError, InvalidInput, SandboxError
from rollserve.sandbox.base import RuntimeReport, SandboxSpec
from rollserve.sandbox.images.reference import Kind, parse
from rollserve.sandbox.kubernetes.pod import PodMarks, manifest, policies
from rollserve.sandbox.kubernetes.settings import DEFAULTS, KubernetesSettings
from rollserve.sandbox.kubernetes.template import read_template
from rollserve.sandbox.pace import HostPace
from rollserve.sandbox.remote.box import RemoteSandbox
from rollserve.sandbox.removal import remove_tree
from rollserve.sandbox.roster import close_all
from rollserve.sandbox.worker_folder import WorkerFolder, left_over

if TYPE_CHECKING:
    from lightkube.resources.core_v1 import Pod

    from rollserve.sandbox.kubernetes.api import ClusterApi
    from rollserve.sandbox.kubernetes.door import PodDoor

REAP_TIMEOUT_S = 30.0
_OVERTIME_S = 300.0
"""Clocks of other machines differ."""

_NOT_HERE = "nodes of a cluster have neither this machine's files nor its cache of images"

logger = logging.getLogger(__name__)


class KubernetesRuntime:
    """Implements ``Runtime``."""

    name = "kubernetes"

    def __init__(self, *, data_dir: Path | None = None, kubernetes: KubernetesSettings = DEFAULTS) -> None:
        self._settings = kubernetes
        self._root = (data_dir or Path("/tmp")).absolute() / self.name
        self._pace = HostPace(self._root, kubernetes.starts_at_once)
        self._held: set[str] = set()
        self._open: dict[str, RemoteSandbox] = {}
        self._opening = asyncio.Lock()
        self._api: ClusterApi | None = None
        self._template: dict[str, Any] = {}
        self._home: WorkerFolder | None = None
        self._root_id = ""
        self._closed = False
        self._report: RuntimeReport | None = None

    # -- what there is
    def report(self) -> RuntimeReport:
        if self._report is not None:
            return self._report
        problem, detail = self._look()
        if problem:
            return RuntimeReport(
                name=self.name,
                usable=False,
                isolated=self._settings.isolated,
                detail=problem,
                remedy=_remedy(),
            )
        self._report = RuntimeReport(
            name=self.name,
            usable=True,
            isolated=self._settings.isolated,
            detail=detail,
            enforces=("memory_mb", "cpus"),
            per_process=("file_mb", "cpu_s"),
            can=("dial",),
        )
        return self._report

    def _look(self) -> tuple[str, str]:
        """A problem, or what to say of the cluster."""
        if importlib.util.find_spec("lightkube") is None:
            return "the package lightkube is not installed", ""
        from rollserve.sandbox.kubernetes.api import look

        try:
            read_template(self._settings.pod_template)
        except ConfigError as error:
            return error.message, ""
        sight = look(self._settings)
        return sight.problem, (
            f"namespace {sight.namespace} of {sight.server}; disk_mb is held by eviction only, which comes "
            "late; processes can't be bounded; no network (but the address of sessions) as far as the "
            "cluster's plugin enforces network policies; not tried on a real cluster"
        )

    def check_image(self, image: str) -> None:
        _image_of(image)

    # -- making one
    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> RemoteSandbox:
        image = _image_of(spec.image)
        for what in ("prepare", "sockets", "mounts", "snapshot"):
            if getattr(spec, what, None):
                raise InvalidInput(f"the runtime kubernetes has no {what}", field=what)
        until = time.monotonic() + self._settings.start_s
        async with self._pace.place():
            if self._closed:
                raise SandboxError("the runtime was closed", operation="sandbox.start")
            api = await self._connected(until=until)
            sandbox_id = f"rollserve-{uuid4().hex}"
            pod = self._pod(sandbox_id, image, spec, owner=owner, ttl_s=ttl_s)
            door = await self._started(api, sandbox_id, pod, until=until)
            sandbox = RemoteSandbox(sandbox_id, door, spec, on_end=lambda: self._forget(sandbox_id))
            self._open[sandbox_id] = sandbox
            await sandbox.prepare(spec, ttl_s=ttl_s)
        return sandbox

    async def _connected(self, *, until: float) -> ClusterApi:
        async with self._opening:
            if self._api is None:
                api = await asyncio.to_thread(self._connect)
                try:
                    for policy in policies(self._settings):
                        await api.see_to(policy, until=until)
                except BaseException:
                    await uninterrupted(api.close())
                    raise
                self._api = api
            return self._api

    def _connect(self) -> ClusterApi:
        """Blocking."""
        if importlib.util.find_spec("lightkube") is None:
            raise SandboxError(
                "the package lightkube is not installed", operation="sandbox.start", hint=_remedy()
            )
        from rollserve.sandbox.kubernetes.api import ClusterApi

        try:
            self._template = read_template(self._settings.pod_template)
            self._root_id = _root_id(self._root)
            self._home = self._home or WorkerFolder(self._root / "workers")
            return ClusterApi(self._settings)
        except ConfigError as error:
            raise SandboxError(str(error), operation="sandbox.start", hint=error.hint) from error

    def _pod(self, sandbox_id: str, image: str, spec: SandboxSpec, *, owner: str, ttl_s: float) -> Pod:
        from lightkube.resources.core_v1 import Pod

        assert self._home is not None
        marks = PodMarks(
            root=self._root_id,
            worker=self._home.path.name,
            owner=owner,
            ends_at=time.time() + self._settings.start_s + ttl_s,
        )
        made = Pod.from_dict(
            manifest(
                sandbox_id,
                image,
                spec.limits,
                marks=marks,
                settings=self._settings,
                template=self._template,
                ttl_s=ttl_s,
            )
        )
        assert isinstance(made, Pod)
        return made

    async def _started(self, api: ClusterApi, sandbox_id: str, pod: Pod, *, until: float) -> PodDoor:
        """One that is not started, or given up, is deleted; where that fails too, a reaper finds it."""
        from rollserve.sandbox.kubernetes.door import PodDoor

        door = PodDoor(
            api,
            sandbox_id,
            stop_s=self._settings.stop_s,
            on_stop=lambda: self._held.discard(sandbox_id),
        )
        self._held.add(sandbox_id)
        try:
            await api.create(pod, until=until)
            await door.opened(until=until)
        except BaseException:
            with suppress(SandboxError):
                await uninterrupted(door.stop())
            raise
        return door

    def _forget(self, sandbox_id: str) -> None:
        self._open.pop(sandbox_id, None)

    # -- the end
    async def reap(self) -> int:
        """Counts those whose end is confirmed; the rest is met again."""
        if importlib.util.find_spec("lightkube") is None:
            return 0
        until = time.monotonic() + REAP_TIMEOUT_S
        api = await self._connected(until=until)
        pods = await api.sandboxes(until=until)
        root = self._root / "workers"
        with left_over(root) as folders:
            doomed = [name for name, marks in _marked(pods) if self._is_orphan(name, marks, folders)]
            ends = await asyncio.gather(
                *(self._end(api, name, until=until) for name in doomed), return_exceptions=True
            )
            failed = [end for end in ends if isinstance(end, BaseException)]
            for error in failed:
                logger.warning("an orphaned pod was not removed: %s", error)
            for folder in folders if not failed else ():
                await asyncio.to_thread(remove_tree, folder)
        return len(doomed) - len(failed)

    async def _end(self, api: ClusterApi, name: str, *, until: float) -> None:
        from rollserve.sandbox.kubernetes.door import gone

        await api.delete(name, until=until)
        await gone(api, name, until=until)

    def _is_orphan(self, name: str, marks: PodMarks, folders: Sequence[Path]) -> bool:
        if self._home is not None and marks.worker == self._home.path.name:
            return name not in self._held
        if time.time() > marks.ends_at + _OVERTIME_S:
            return True
        worker = self._root / "workers" / marks.worker
        return marks.root == self._root_id and (worker in folders or not worker.exists())

    async def close(self) -> None:
        self._closed = True
        try:
            await close_all(self._open.values())
        finally:
            api, self._api = self._api, None
            if api is not None:
                await api.close()
        if self._home is not None:
            await asyncio.to_thread(self._home.close)
            self._home = None


def _marked(pods: Sequence[Pod]) -> list[tuple[str, PodMarks]]:
    found = []
    for pod in pods:
        data = pod.metadata
        marks = PodMarks.read(data.labels or {}, data.annotations or {}) if data is not None else None
        if data is not None and data.name is not None and marks is not None:
            found.append((data.name, marks))
    return found


def _image_of(image: str) -> str:
    """As a node pulls it. Raises ``InvalidInput``."""
    reference = parse(image)
    if reference.kind is not Kind.REGISTRY:
        raise InvalidInput(
            f"the runtime kubernetes can't start from {image!r}: {_NOT_HERE}",
            field="image",
            hint="push it to a registry that the cluster reaches, and name it docker://HOST/NAME:TAG",
        )
    return str(reference.place)


def _root_id(root: Path) -> str:
    """Blocking, of a file of some bytes. Made once for the workers of a folder: its path is no name, since
    another machine may have the same."""
    place = root / "id"
    if not place.exists():
        root.mkdir(parents=True, exist_ok=True)
        fresh = root / f".id-{uuid4().hex}"
        fresh.write_text(uuid4().hex)
        with suppress(FileExistsError):
            os.link(fresh, place)
        fresh.unlink()
    return place.read_text()


def _remedy() -> str:
    how = installing.extra("kubernetes")
    return f"{how}, and set kubernetes.kubeconfig, or run in a pod with a service account"
