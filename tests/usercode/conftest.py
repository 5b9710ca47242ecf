"""A folder of user code, and hosts over it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollserve.usercode.hosts import HostSettings, ZygoteHosts

GOOD = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time
from dataclasses import dataclass

CALLS = 0

def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first
        b (int): the second,
            which may be left out

    Returns:
        their sum
    """
    print("adding", a, b)
    return a + b

async def later(text: str) -> str:
    await asyncio.sleep(0)
    return text

def count() -> int:
    global CALLS
    CALLS += 1
    return CALLS

def odd_names(json: dict, _hidden: int = 1, *, schema: str = "s") -> dict:
    return {"json": json, "_hidden": _hidden, "schema": schema}

def pid() -> int:
    return os.getpid()

def environment() -> dict:
    return dict(os.environ)

def first_draw() -> float:
    import numpy
    return float(numpy.random.random())

def crash() -> None:
    raise KeyError("nope")

def crash_silly() -> None:
    class Silly(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no str")
    raise Silly

def recurse() -> None:
    recurse()

def leave() -> None:
    sys.exit(3)

def leave_hard() -> None:
    os._exit(7)

def segfault() -> None:
    print("last words", flush=True)
    ctypes.string_at(0)

def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

def spin() -> None:
    print("started")
    while True:
        pass

def stubborn() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    print("started")
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass

async def async_stubborn() -> None:
    print("started")
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def async_polite() -> None:
    try:
        print("started")
        await asyncio.sleep(1000)
    finally:
        print("cleaned up")

def flood(lines: int) -> str:
    for number in range(lines):
        print("x" * 200)
    return "done"

def flood_for_ever() -> None:
    while True:
        print("x" * 200)

def binary() -> None:
    os.write(1, b"\\xff\\xfe text\\n")
    sys.stderr.write("no newline at the end")

def garbage() -> None:
    for fd in range(3, 64):
        try:
            os.write(fd, b"\\xff" * 64)
        except OSError:
            pass
    time.sleep(1000)

def too_big() -> str:
    return "x" * (40 << 20)

def eat_memory() -> int:
    return len(bytearray(2 << 30))

def daemon(path: str) -> None:
    """Leave a process that has left the session and the group."""
    code = f"import os, time; os.setsid(); open({path!r} + '.tmp', 'w').write(str(os.getpid())); "
    code += f"os.rename({path!r} + '.tmp', {path!r}); time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", code])
    while not os.path.exists(path):
        time.sleep(0.005)

@dataclass
class Point:
    x: int

def point() -> Point:
    return Point(1)

def reads(sandbox, path: str) -> str:
    """Read a file."""
    return sandbox.read_file(path).decode()

async def reads_async(sandbox, path: str) -> str:
    return (await sandbox.read_file(path)).decode()

class Thing:
    value = 5

NUMBER = 5

def variadic(*args: int) -> None: ...
def unknown_type(x: "Nowhere") -> None: ...
def no_schema(x: threading.Thread) -> None: ...
'''

MODULES = {
    "good": GOOD,
    "broken_syntax": "def f(:\n",
    "broken_import": "import nothing_of_the_kind\n",
    "broken_body": "raise ValueError('at import')\n",
    "leaves": "import sys; sys.exit(4)\n",
    "hangs": "import time\nwhile True: time.sleep(1)\n",
    "threaded": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    "def f() -> str:\n    return 'ok'\n",
}


def write_modules(folder: Path) -> Path:
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def code_dir(tmp_path: Path) -> Path:
    return write_modules(tmp_path / "code")


@pytest.fixture
async def hosts(code_dir: Path) -> AsyncIterator[ZygoteHosts]:
    hosts = ZygoteHosts(code_dir=code_dir, settings=HostSettings(cancel_grace_s=0.3))
    yield hosts
    await hosts.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_hosts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ZygoteHosts]:
    """For tests that only look."""
    hosts = ZygoteHosts(code_dir=write_modules(tmp_path_factory.mktemp("shared") / "code"))
    yield hosts
    await hosts.close()
