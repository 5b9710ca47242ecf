"""An authority in a sandbox: trusted by what is started in it, beside what was trusted before."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.errors import SandboxError
from rollserve.sandbox.base import Runtime, Sandbox, SandboxSpec
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.trust import trust, trusted_in
from rollserve.testing.certificates import Authority

pytestmark = pytest.mark.userns


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    runtime = BubblewrapRuntime(data_dir=tmp_path)
    yield runtime
    await runtime.close()


async def made(runtime: Runtime, theirs: bytes = b"", **env: str) -> Sandbox:
    spec = SandboxSpec(env=env, files={"theirs.pem": theirs})
    return await runtime.create(spec, owner="a/1", ttl_s=60)


def subjects(bundle: bytes) -> list[object]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=bundle.decode())
    return [found["subject"] for found in context.get_ca_certs()]


async def test_it_is_added_to_what_is_trusted(runtime: Runtime, tmp_path: Path) -> None:
    ours, theirs = (Authority(tmp_path, name).file.read_bytes() for name in ("ours", "theirs"))
    sandbox = await made(runtime, theirs, SSL_CERT_FILE="/workspace/theirs.pem")
    await trust(sandbox, ours.rstrip())
    files = trusted_in(sandbox)
    assert await sandbox.read_file(files.authority) == ours
    assert subjects(await sandbox.read_file(files.bundle)) == subjects(ours) + subjects(theirs)
    for name, value in files.env.items():
        assert (await sandbox.exec(f"echo ${name}")).output == f"{value}\n"
    heard: list[bytes] = []
    await sandbox.run("echo $SSL_CERT_FILE", timeout_s=20, on_output=heard.append)
    assert b"".join(heard).decode() == f"{files.bundle}\n"


async def test_a_sandbox_that_trusts_nobody_trusts_it(runtime: Runtime, tmp_path: Path) -> None:
    ours = Authority(tmp_path).file.read_bytes()
    sandbox = await made(runtime, SSL_CERT_FILE="/nowhere")
    await trust(sandbox, ours)
    assert subjects(ours)[0] in subjects(await sandbox.read_file(trusted_in(sandbox).bundle))


async def test_where_it_can_not_be_placed(runtime: Runtime) -> None:
    sandbox = await made(runtime)
    await sandbox.exec(f"mkdir -p {trusted_in(sandbox).bundle}")
    with pytest.raises(SandboxError, match="was not placed"):
        await trust(sandbox, b"x")
    assert (await sandbox.exec("echo $NODE_EXTRA_CA_CERTS")).output == "\n"
