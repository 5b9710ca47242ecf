"""What is taken out of a run sandbox before it is closed: artifacts, and the files a grader wants.

The shell of a run sandbox was the agent's, so nothing it says is trusted: sizes are bounded on this
side, and unpacking takes only what lies under the carried paths. What the agent could have written
there itself is all it can smuggle in.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollserve.errors import AgentFailure, InfrastructureFailure, SandboxError, TooLarge
from rollserve.rollouts.worker_ports import Bounds
from rollserve.sandbox.base import WORKDIR, Sandbox
from rollserve.store.payload import Segment


async def collect_artifacts(
    sandbox: Sandbox,
    paths: Sequence[str],
    segment: Segment,
    *,
    bounds: Bounds,
    log: Callable[[str], None],
) -> None:
    """What can't be read, or is too large, is a line in the log and no more."""
    left = bounds.artifacts_bytes
    for path in paths:
        if left <= 0:
            log(f"artifact {path}: left out, the artifacts are over {bounds.artifacts_bytes} bytes")
            continue
        try:
            data = await sandbox.read_file(path, limit_bytes=min(bounds.artifact_bytes, left))
        except (SandboxError, TooLarge) as error:
            log(f"artifact {path}: {error}")
            continue
        left -= len(data)
        segment.append_artifact(path, data)


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Two tar archives: members relative to the working directory, and to the root. Empty: none."""

    workspace: bytes = b""
    root: bytes = b""


async def pack(
    sandbox: Sandbox, paths: Sequence[str], *, name: str, bounds: Bounds, log: Callable[[str], None]
) -> Carried:
    """The files under ``paths``, those that exist.

    Raises ``AgentFailure`` when the agent left more than ``carry_bytes`` (or no room or process to pack it),
    ``InfrastructureFailure`` when they can't be packed here.
    """
    in_workspace, elsewhere = _split(paths)
    left = bounds.carry_bytes
    workspace = await _pack(sandbox, _WORKSPACE, in_workspace, name, left, bounds.collect_s, log)
    left -= len(workspace)
    root = await _pack(sandbox, "/", elsewhere, name, left, bounds.collect_s, log)
    return Carried(workspace=workspace, root=root)


async def unpack(
    sandbox: Sandbox, carried: Carried, paths: Sequence[str], *, name: str, timeout_s: float
) -> None:
    """Lay the files of ``pack`` down in a fresh sandbox: those under ``paths``, and no others."""
    in_workspace, elsewhere = _split(paths)
    await _unpack(sandbox, _WORKSPACE, in_workspace, carried.workspace, name, timeout_s)
    await _unpack(sandbox, "/", elsewhere, carried.root, name, timeout_s)


def missing_of(paths: Sequence[str], kept: Sequence[str]) -> list[str]:
    """Those of ``paths`` that do not lie in what was kept."""
    whole = [_absolute(path) for path in kept]
    return [
        path
        for path in paths
        if not any(_absolute(path) == each or _absolute(path).startswith(f"{each}/") for each in whole)
    ]


def _absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join(WORKDIR, path))


def _split(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Relative to the working directory where they lie in it, else to the root. A runtime without
    namespaces has its working directory elsewhere, and says where in ``WORKSPACE``."""
    in_workspace: list[str] = []
    elsewhere: list[str] = []
    for path in paths:
        absolute = _absolute(path)
        if absolute == WORKDIR or absolute.startswith(f"{WORKDIR}/"):
            in_workspace.append(f".{absolute[len(WORKDIR) :]}")
        elif absolute.strip("/"):
            elsewhere.append(absolute.lstrip("/"))
        else:
            raise InfrastructureFailure(f"the grader can't carry {path!r}", operation="carry")
    return in_workspace, elsewhere


async def _pack(
    sandbox: Sandbox,
    base: str,
    members: Sequence[str],
    name: str,
    limit_bytes: int,
    timeout_s: float,
    log: Callable[[str], None],
) -> bytes:
    if not members:
        return b""
    archive = f"/tmp/carry-{name}.tar"
    script = _PACK.format(
        base=base, members=shlex.join(members), archive=archive, bytes=limit_bytes + 1, no_room=_NO_ROOM
    )
    result = await sandbox.exec(script, timeout_s=timeout_s)
    words = result.output[-500:].strip()
    if result.exit_code == _NO_ROOM:
        raise AgentFailure(f"no room is left to pack the files to grade: {words}", operation="carry")
    if result.timed_out or result.exit_code in _NO_TAR:
        raise InfrastructureFailure(f"the files to grade can't be packed: {words}", operation="carry")
    if result.exit_code and result.exit_code != _TAR_CUT:
        log(f"carry: tar ended with {result.exit_code}: {words}")
    try:
        data = await sandbox.read_file(archive, limit_bytes=limit_bytes)
    except TooLarge as error:
        raise AgentFailure(f"the files to grade are over {limit_bytes} bytes", operation="carry") from error
    except SandboxError as error:
        if not _NO_FORK.search(words):
            raise
        message = f"what the agent left running leaves no process to pack the files to grade: {words}"
        raise AgentFailure(message, operation="carry") from error
    await sandbox.exec(f"rm -f {archive}", timeout_s=timeout_s)
    return data


async def _unpack(
    sandbox: Sandbox, base: str, members: Sequence[str], data: bytes, name: str, timeout_s: float
) -> None:
    if not data:
        return
    archive = f"/tmp/carried-{name}.tar"
    await sandbox.write_file(archive, data)
    script = _UNPACK.format(base=base, members=shlex.join(members), archive=archive)
    result = await sandbox.exec(script, timeout_s=timeout_s)
    if result.timed_out or result.exit_code != 0:
        words = result.output[-500:].strip()
        raise InfrastructureFailure(f"the files to grade can't be unpacked: {words}", operation="carry")


_WORKSPACE = f'"${{WORKSPACE:-{WORKDIR}}}"'
_NO_TAR = (126, 127)
_NO_FORK = re.compile("fork.*temporarily unavailable|cannot fork", re.IGNORECASE)
_TAR_CUT = 141
_NO_ROOM = 99

_PACK = """(cd {base} || exit 1; set --
for p in {members}; do [ -e "$p" ] && set -- "$@" "$p"; done
rm -rf {archive} {archive}.rc
[ $# -gt 0 ] || {{ : > {archive}; exit 0; }}
{{ tar -cf - -- "$@"; echo $? > {archive}.rc; }} | head -c {bytes} > {archive} || exit {no_room}
read -r rc < {archive}.rc || exit {no_room}
rm -f {archive}.rc; exit "$rc")"""
"""``head`` bounds what is written; the status of ``tar`` goes round the pipe."""

_UNPACK = """(base=$(cd {base} && pwd -P) && stage={archive}.d && rm -rf "$stage" && mkdir "$stage" &&
cd "$stage" && stage=$(pwd -P) || exit 1; set --
tar -tf {archive} > {archive}.list || exit 1
for p in {members}; do grep -qxF -e "$p" -e "$p/" {archive}.list && set -- "$@" "$p"; done
[ $# -gt 0 ] || {{ rm -rf {archive} {archive}.list "$stage"; exit 0; }}
rc=0; tar --no-same-owner -xf {archive} -- "$@" || rc=$?
find . -type l | while IFS= read -r link; do
  to=$(readlink -f -- "$link") || to=
  case "$to" in
    "$stage"/*) [ -e "$link" ] && continue ;;
    /usr/*|/bin/*|/sbin/*|/lib*|/opt/*|/etc/*) continue ;;
    *) for p; do case "$to" in "${{base%/}}/${{p#./}}"/*) continue 2 ;; esac; done ;;
  esac
  echo "left out, as it leads elsewhere: $link"; rm -f -- "$link"
done
tar -cf - -- "$@" | tar --no-same-owner -xf - -C "$base" || rc=$?
cd /; rm -rf {archive} {archive}.list "$stage"; exit $rc)"""
"""Only members that were asked for: an archive that the agent tampered with brings no others. They come to
an empty folder first, where a hard link finds nothing to be a link to, and a symbolic link is left out that
leads to what was not carried: it would show the grader's own files as the agent's."""
