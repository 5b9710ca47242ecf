"""Big files in and out of a sandbox, piece by piece: what is in memory is a pipe's worth.

Over ``spawn``, so every runtime that has programs has this. ``read_file`` and ``write_file`` are quicker
for what fits in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.base import Program, Sandbox
from rollserve.sandbox.capture import Capture
from rollserve.sandbox.tools.base import shell_path

_DONE = b"\n\0rollserve-done\0"
_MESSAGE_BYTES = 2000


@asynccontextmanager
async def _program(sandbox: Sandbox, command: str, errors: Capture) -> AsyncIterator[Program]:
    program = await sandbox.spawn(command, on_errors=errors.feed)
    try:
        yield program
    finally:
        await program.kill()


async def download(sandbox: Sandbox, path: str) -> AsyncIterator[bytes]:
    """The contents of a file, as it comes; a consumer that is slow holds the reader up. Close it when you
    leave early. Raises ``SandboxError`` when it can't be read to its end."""
    name, errors = _checked(path), Capture(_MESSAGE_BYTES)
    command = f"[ -f {name} ] || {{ echo no such file, or not a regular one >&2; exit 1; }}; "
    command += f"cat < {name} && printf '\\n\\000rollserve-done\\000' >&2"
    async with _program(sandbox, command, errors) as program:
        while data := await program.read():
            yield data
        if not errors.raw().endswith(_DONE):
            raise SandboxError(f"cannot read {path}: {errors.text().strip()}", operation="sandbox.file")


async def upload(sandbox: Sandbox, path: str, parts: AsyncIterator[bytes]) -> None:
    """Create or replace a file and its missing parent folders; the file is there once all of it is.
    Raises ``SandboxError``."""
    name, errors = _checked(path), Capture(_MESSAGE_BYTES)
    part = f"{name}.rollserve-part"
    command = f'mkdir -p "$(dirname {name})" && cat > {part} && mv -f {part} {name} && printf done'
    async with _program(sandbox, command, errors) as program:
        try:
            async for data in parts:
                await program.write(data)
        except SandboxError:
            pass  # it has ended, and says why
        else:
            program.end_input()
            if await program.read() == b"done":
                return
        while await program.read():
            continue
    raise SandboxError(f"cannot write {path}: {errors.text().strip()}", operation="sandbox.file")


def _checked(path: str) -> str:
    if not path:
        raise InvalidInput("'' is not a path", field="path")
    return shell_path(path)
