"""What is taken out of a run sandbox before it is closed: artifacts, and the files a grader wants.

The shell of a run sandbox was the agent's, so nothing it says is trusted: sizes are bounded on this
side, and unpacking takes only what lies under the carried paths. What the agent could have written
there itself is all it can smuggle in.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Sequence

from rollserve.errors import AgentFailure, InfrastructureFailure, SandboxError, TooLarge
from rollserve.sandbox.base import WORKDIR, Sandbox
from rollserve.store.base import Segment

_NO_SUCH_COMMAND = (126, 127)


async def collect_artifacts(
    sandbox: Sandbox,
    paths: Sequence[str],
    segment: Segment,
    *,
    each_bytes: int,
    total_bytes: int,
    log: Callable[[str], None],
) -> None:
    """What can't be read, or is too large, is a line in the log and no more."""
    left = total_bytes
    for path in paths:
        if left <= 0:
            log(f"artifact {path}: left out, the artifacts are over {total_bytes} bytes")
            continue
        try:
            data = await sandbox.read_file(path, limit_bytes=min(each_bytes, left))
        except (SandboxError, TooLarge) as error:
            log(f"artifact {path}: {error}")
            continue
        left -= len(data)
        segment.append_artifact(path, data)


def _relative(path: str) -> str:
    """Relative to the root, the way the archive holds it. Raises ``InfrastructureFailure``."""
    absolute = posixpath.normpath(posixpath.join(WORKDIR, path)).lstrip("/")
    if not absolute or absolute.startswith(".."):
        raise InfrastructureFailure(f"the grader can't carry {path!r}", operation="carry")
    return absolute


async def pack(
    sandbox: Sandbox,
    paths: Sequence[str],
    *,
    name: str,
    limit_bytes: int,
    timeout_s: float,
    log: Callable[[str], None],
) -> bytes:
    """The files under ``paths`` (those that exist) as a tar archive; empty when there are none.

    Raises ``AgentFailure`` when the agent left more than ``limit_bytes``, ``InfrastructureFailure``
    when they can't be packed here.
    """
    archive = f"/tmp/carry-{name}.tar"
    wanted = " ".join(shlex.quote(_relative(path)) for path in paths)
    script = (
        f"(cd /; set --; for p in {wanted}; do [ -e \"$p\" ] && set -- \"$@\" \"$p\"; done; rm -f {archive}; "
        f'[ $# -gt 0 ] || {{ : > {archive}; exit 0; }}; '
        f'{{ tar -cf - -- "$@"; echo $? > {archive}.rc; }} | head -c {limit_bytes + 1} > {archive}; '
        f"read -r rc < {archive}.rc; rm -f {archive}.rc; exit $rc)"
    )
    result = await sandbox.exec(script, timeout_s=timeout_s)
    if result.timed_out or result.exit_code in _NO_SUCH_COMMAND:
        why = f"took over {timeout_s:g} s" if result.timed_out else result.output[-500:].strip()
        raise InfrastructureFailure(f"the files to grade can't be packed: {why}", operation="carry")
    if result.exit_code:
        log(f"carry: tar ended with {result.exit_code}: {result.output[-500:].strip()}")
    try:
        return await sandbox.read_file(archive, limit_bytes=limit_bytes)
    except TooLarge as error:
        raise AgentFailure(f"the files to grade are over {limit_bytes} bytes", operation="carry") from error


async def unpack(sandbox: Sandbox, archive: bytes, paths: Sequence[str], *, timeout_s: float) -> None:
    """Lay the files of ``pack`` down in a fresh sandbox: those under ``paths``, and no others."""
    if not archive:
        return
    place = "/tmp/carried.tar"
    await sandbox.write_file(place, archive)
    members = " ".join(shlex.quote(_relative(path)) for path in paths)
    # A path that the archive lacks makes tar complain; list first, and ask for those that are there.
    script = (
        f"(cd /; set --; tar -tf {place} > {place}.list || exit 1; "
        f"for p in {members}; do "
        f'grep -qxF -e "$p" -e "$p/" {place}.list && set -- "$@" "$p"; done; '
        f'[ $# -eq 0 ] || tar --no-same-owner -xf {place} -- "$@"; rc=$?; '
        f"rm -f {place} {place}.list; exit $rc)"
    )
    result = await sandbox.exec(script, timeout_s=timeout_s)
    if result.timed_out or result.exit_code != 0:
        raise InfrastructureFailure(
            f"the files to grade can't be unpacked: {result.output[-500:].strip()}", operation="carry"
        )
