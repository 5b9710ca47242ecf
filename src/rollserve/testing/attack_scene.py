"""How the attacks of ``attacks`` are tried: two sandboxes, what they are after, and ways to ask."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollserve.errors import EpisodeFailure
from rollserve.records.network import AllowedHosts
from rollserve.rollouts.keepsakes import pack, unpack
from rollserve.rollouts.worker_ports import Bounds
from rollserve.sandbox import processes
from rollserve.sandbox.base import Runtime, Sandbox, SandboxLimits, SandboxSpec
from rollserve.sandbox.egress.addresses import AddressRules
from rollserve.sandbox.egress.proxy import Egress, EgressBounds
from rollserve.testing.fake_internet import OTHER_SITE, SITE, FakeInternet
from rollserve.testing.runtime_probes import OWNER, TTL_S, host_has, processes_with, unique_seconds

THROUGH = "through"
ALLOWED = AllowedHosts(allow=["allowed.test", "*.site.test"])
ALLOWED_PLACES = frozenset({(SITE, 80), (SITE, 443)})
STRANGERS = ("other.test", "xallowed.test", "allowed.test.other.test", "site.test")
PROXY_BOUNDS = EgressBounds(connections=16, total_bytes=4 << 20, head_s=1.0)
LIMITS = SandboxLimits(memory_mb=128, processes=64, file_mb=64, disk_mb=64, cpus=0.5)
COMMAND_S = 40.0


@dataclass(frozen=True)
class Scene:
    """Two sandboxes of one runtime, and what they are after: a file and a process of the host, a port and an
    abstract socket that listen there. A third one, ``online``, has two proxies: ``listed`` lets through to
    some hosts, ``proxy`` to any. What they lead to is ``net``."""

    runtime: Runtime
    box: Sandbox
    other: Sandbox
    secret: Path
    victim: int
    port: int
    abstract: str
    online: Sandbox
    net: FakeInternet
    proxy: int
    listed: int

    async def says_through(self, command: str) -> bool:
        result = await self.box.exec(command, timeout_s=COMMAND_S)
        return THROUGH in result.output.split()


Try = Callable[[Scene], Awaitable[bool]]
"""Whether it got through."""


def shell(command: str) -> Try:
    """``command`` may use ``{secret}``, ``{victim}``, ``{port}`` and ``{abstract}``."""

    def tries(scene: Scene) -> Awaitable[bool]:
        values = {name: str(getattr(scene, name)) for name in ("secret", "victim", "port", "abstract")}
        text = command
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        return scene.says_through(text)

    return tries


def perl(code: str) -> Try:
    """``code`` may call ``got``, and holds no single quote. The word is not in it: a shell shows the command
    that was killed."""
    return shell(f"perl -e 'sub got {{ print qq(thr), qq(ough\\n) }} {code}'")


def syscall(number_x86: int, number_arm: int, arguments: str) -> Try:
    """A raw call, through when it does not fail."""
    numbers = {"x86_64": number_x86, "aarch64": number_arm}
    number = numbers.get(os.uname().machine, number_x86)
    return perl(f"got() if syscall({number}, {arguments}) != -1")


def connect(address: str, port: int | str) -> Try:
    """Within two seconds."""
    there = f'sockaddr_in({port}, inet_aton("{address}"))'
    return perl(f"use Socket; socket(S, 2, 1, 0); alarm 2; connect(S, {there}) and got()")


def _make_readable(secret: Path) -> None:
    secret.write_text("s3cret")
    secret.chmod(0o644)


@asynccontextmanager
async def scene(runtime: Runtime, folder: Path) -> AsyncIterator[Scene]:
    """``folder`` is on the host, and everybody may read what is in it."""
    secret = folder / "secret"
    await asyncio.to_thread(_make_readable, secret)
    abstract = f"rollserve-attack-{secrets.token_hex(4)}"
    victim = await asyncio.create_subprocess_exec("sleep", unique_seconds())
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix,
    ):
        unix.bind("\0" + abstract)
        unix.listen()
        try:
            spec = SandboxSpec(limits=LIMITS)
            online = await runtime.create(spec, owner=OWNER, ttl_s=TTL_S)
            async with _proxies(online) as (net, proxy, listed):
                yield Scene(
                    runtime=runtime,
                    box=await runtime.create(spec, owner=OWNER, ttl_s=TTL_S),
                    other=await runtime.create(spec, owner=OWNER, ttl_s=TTL_S),
                    secret=secret,
                    victim=victim.pid,
                    port=server.getsockname()[1],
                    abstract=abstract,
                    online=online,
                    net=net,
                    proxy=proxy,
                    listed=listed,
                )
        finally:
            if victim.returncode is None:
                victim.kill()
            await victim.wait()


@asynccontextmanager
async def _proxies(sandbox: Sandbox) -> AsyncIterator[tuple[FakeInternet, int, int]]:
    """The proxies of a sandbox on an internet where all but the sites of ``ALLOWED`` say that somebody got
    through to them."""
    net = FakeInternet(attacks_names())
    net.says = lambda address, port: "a site" if (address, port) in ALLOWED_PLACES else f"{THROUGH}\n"
    egress = Egress(rules=AddressRules(), bounds=PROXY_BOUNDS, internet=net.internet)
    any_sock, listed_sock = await sandbox.listen(), await sandbox.listen()
    ports = int(any_sock.getsockname()[1]), int(listed_sock.getsockname()[1])
    async with (
        egress.serve("full", any_sock, log=lambda line: None),
        egress.serve(ALLOWED, listed_sock, log=lambda line: None),
    ):
        yield net, *ports
    await net.close()


def attacks_names() -> dict[str, list[list[str]]]:
    return {
        "allowed.test": [[SITE]],
        **{name: [[OTHER_SITE]] for name in STRANGERS},
        "metadata.test": [["169.254.169.254"]],
        "api.test": [["127.0.0.1"]],
        "mixed.test": [["127.0.0.1", SITE], [SITE, "127.0.0.1"]],
        "rebind.test": [[SITE], ["127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"]],
    }


# -- those that take more than a command ------------------------------------------------------


async def kill_host_process(scene: Scene) -> bool:
    await scene.box.exec(f"kill -9 {scene.victim}; kill -9 -1", timeout_s=COMMAND_S)
    return processes.state(scene.victim) in ("Z", "X", None)


async def fork_bomb(scene: Scene) -> bool:
    mark = unique_seconds()
    bomb = f"f() {{ sleep {mark} & f & f & wait; }}; f; for i in $(seq 400); do sleep {mark} & done; wait"
    running = asyncio.create_task(scene.box.exec(bomb, timeout_s=2.0))
    await asyncio.wait({running})
    return len(processes_with(mark)) > LIMITS.processes


async def outlive(scene: Scene) -> bool:
    """A daemon with a parent, a session and a name of its own; and zombies."""
    mark = unique_seconds()
    daemon = f"(setsid nohup sh -c 'trap \"\" TERM HUP INT; (sleep {mark}; :) &' >/dev/null 2>&1 &)"
    zombies = "perl -e 'for (1..20) { fork or exit } sleep 300' &"
    await scene.other.exec(f"{daemon}; {zombies} sleep 0.2", timeout_s=COMMAND_S)
    await scene.other.close()
    return bool(processes_with(mark))


async def huge_output(scene: Scene) -> bool:
    """More than is kept of it."""
    result = await scene.box.exec("yes | head -c 50000000", timeout_s=COMMAND_S, output_limit_bytes=10_000)
    return len(result.output) > 20_000


async def forge_answer(scene: Scene) -> bool:
    """A forged answer on the supervisor's pipe: another exit code for the next command."""
    forge = "for fd in /proc/$PPID/fd/1 /proc/$$/fd/*; do printf '\\0key 0 1\\0' > $fd; done 2>/dev/null"
    await scene.box.exec(f"({forge}) &", timeout_s=COMMAND_S)
    return (await scene.box.exec("(exit 7)", timeout_s=COMMAND_S)).exit_code != 7


async def processor(scene: Scene) -> bool:
    """Two busy processes for a second of the clock, allowed half a processor."""
    spin = "$p = fork; $e = time + 2; 1 while time < $e; exit if !$p; wait"
    busy = f"perl -e '{spin}; @t = times; print $t[0] + $t[2]'"
    result = await scene.box.exec(busy, timeout_s=COMMAND_S)
    return float(result.output or 0) > 1.5


async def _carried(scene: Scene, tamper: str, looks: str) -> bool:
    """``tamper`` in the agent's sandbox; only ``answer`` is carried over; ``looks`` in the grader's."""
    clean = {"tests/run": b"exit 1\n", "tests/expected": b"42"}
    for path, data in clean.items():
        await scene.other.write_file(path, data)
    await scene.box.exec("mkdir -p tests; echo wrong > answer")
    await scene.box.exec(tamper)
    bounds = Bounds()
    name = "attack"
    try:
        carried = await pack(scene.box, ["answer"], name=name, bounds=bounds, log=lambda line: None)
        await unpack(scene.other, carried, ["answer"], name=name, timeout_s=COMMAND_S)
    except EpisodeFailure:
        return False
    return THROUGH in (await scene.other.exec(looks)).output.split()


async def changes_host(scene: Scene) -> bool:
    mark = f"rollserve-{secrets.token_hex(4)}"
    await scene.box.exec(
        f"for d in /usr /etc /usr/bin /tmp; do echo x > $d/{mark}; done; rm -f /etc/hostname"
    )
    return any(host_has(f"{folder}/{mark}") for folder in ("/usr", "/etc", "/usr/bin", "/tmp"))


async def other_session(scene: Scene) -> bool:
    with await scene.other.listen() as sock:
        port = sock.getsockname()[1]
        return await connect("127.0.0.1", port)(scene)


def carries(tamper: str, looks: str) -> Try:
    return lambda scene: _carried(scene, tamper, looks)


EQUAL = f'[ "$(cat answer)" = 42 ] && echo {THROUGH}'
OWN_EXPECTED = "mkdir -p tests; echo x > tests/expected"
PASSES = f"sh tests/run && echo {THROUGH}"
FAKE_TAR = (
    "mkdir -p fake && cd fake && cp -r ../tests . && mkdir -p tests && echo 'exit 0' > tests/run && "
    "echo x > answer && tar -cf /tmp/fake.tar ./answer ./tests && cd .. && "
    "mkdir -p /tmp/bin && printf '#!/bin/sh\\ncat /tmp/fake.tar\\n' > /tmp/bin/tar && "
    "chmod +x /tmp/bin/tar && export PATH=/tmp/bin:$PATH"
)
HARD_LINK_TAR = (
    "mkdir -p fake/tests && cd fake && echo x > tests/expected && ln tests/expected answer && "
    "tar -cf /tmp/fake.tar ./tests/expected ./answer && cd .. && "
    "mkdir -p /tmp/bin && printf '#!/bin/sh\\ncat /tmp/fake.tar\\n' > /tmp/bin/tar && "
    "chmod +x /tmp/bin/tar && export PATH=/tmp/bin:$PATH"
)
