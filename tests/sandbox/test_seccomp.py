"""The filter of system calls: read as the kernel reads it, and installed for real."""

from __future__ import annotations

import errno
import json
import struct
import subprocess
import sys

import pytest

from rollserve.sandbox.seccomp import ARCHES, REFUSED, WATCHED, Filter, filter_program

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
CLONE_THREAD, CLONE_NEWUSER, CLONE_NEWNS, SIGCHLD = 0x10000, 0x10000000, 0x20000, 17


def verdict(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """0 for a call that is let through, else the error it gets: classic BPF over one call's data."""
    program = filter_program(machine)
    assert program is not None
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, ARCHES[machine] if arch is None else arch, 0, *padded)
    code = list(struct.iter_unpack("<HBBI", program))
    place = accumulator = 0
    while True:
        operation, then, otherwise, value = code[place]
        place += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x06:
            return 0 if value == ALLOW else value & 0xFFFF if value & 0xFFFF0000 == ERRNO else -1
        else:
            met = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}
            place += then if met[operation] else otherwise


@pytest.mark.parametrize("machine", sorted(ARCHES))
def test_exactly_the_listed_calls_are_refused(machine: str) -> None:
    watched = set(WATCHED[machine].values())
    refused = set(REFUSED[machine].values())
    for number in range(500):
        expected = errno.EPERM if number in refused else 0
        if number not in watched:
            assert verdict(machine, number) == expected, number


@pytest.mark.parametrize("machine", sorted(ARCHES))
def test_calls_are_refused_by_their_arguments(machine: str) -> None:
    numbers = WATCHED[machine]
    for name, arguments, expected in (
        ("clone", (CLONE_THREAD | SIGCHLD,), 0),
        ("clone", (CLONE_NEWUSER | SIGCHLD,), errno.EPERM),
        ("clone", (CLONE_NEWNS | SIGCHLD,), errno.EPERM),
        ("clone3", (0,), errno.ENOSYS),
        ("unshare", (0x400,), 0),
        ("unshare", (CLONE_NEWUSER,), errno.EPERM),
        ("unshare", (0x80,), errno.EPERM),
        ("ioctl", (0, 0x5413), 0),
        ("ioctl", (0, 0x5412), errno.EPERM),
        ("ioctl", (0, 0xFFFF_FFFF_0000_5412), errno.EPERM),
        ("ioctl", (0, 0x541C), errno.EPERM),
        ("socket", (1,), 0),
        ("socket", (2,), 0),
        ("socket", (16,), 0),
        ("socket", (40,), errno.EAFNOSUPPORT),
        ("socket", (38,), errno.EAFNOSUPPORT),
        ("personality", (0xFFFFFFFF,), 0),
        ("personality", (0x40000,), 0),
        ("personality", (0x0400000,), errno.EPERM),
    ):
        assert verdict(machine, numbers[name], *arguments) == expected, (name, arguments)


def test_calls_of_another_kind_of_machine_are_none() -> None:
    assert verdict("x86_64", 1, arch=0x40000003) == errno.ENOSYS
    assert verdict("x86_64", 0x40000001) == errno.ENOSYS
    assert verdict("aarch64", 1, arch=0x40000028) == errno.ENOSYS


def test_a_machine_that_is_not_known_has_no_filter() -> None:
    assert filter_program("m68k") is None


def test_every_start_reads_the_filter_from_its_beginning() -> None:
    held = Filter()
    if not held.exists:
        pytest.skip("no filter for this machine")
    first, second = held.opened(), held.opened()
    with open(first, "rb") as one, open(second, "rb") as two:
        assert one.read() == two.read() == filter_program()
    held.close()
    held.close()


_INSTALLED = """
import ctypes, json, os, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
program = bytes.fromhex(sys.argv[1])
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
held = ctypes.create_string_buffer(program, len(program))
assert libc.prctl(38, 1, 0, 0, 0) == 0
shown = Program(len(program) // 8, ctypes.addressof(held))
assert libc.prctl(22, 2, ctypes.byref(shown)) == 0, os.strerror(ctypes.get_errno())
results = {}
for name, (number, arguments) in json.loads(sys.argv[2]).items():
    ctypes.set_errno(0)
    done = libc.syscall(number, *arguments)
    results[name] = ctypes.get_errno() if done == -1 else 0
threads = [threading.Thread(target=lambda: None) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
results["program"] = subprocess.run([sys.executable, "-c", "pass"]).returncode
print(json.dumps(results))
"""


def test_the_kernel_takes_it_and_ordinary_programs_do_not_notice() -> None:
    program = filter_program()
    if program is None or sys.platform != "linux":
        pytest.skip("no filter for this machine")
    machine = next(name for name in ARCHES if filter_program(name) == program)
    refused, watched = REFUSED[machine], WATCHED[machine]
    names = ("keyctl", "add_key", "bpf", "perf_event_open", "userfaultfd", "mount", "umount2", "pivot_root")
    more = ("kexec_load", "init_module", "finit_module", "io_uring_setup", "setns", "fsopen")
    calls = {name: (refused[name], [0, 0, 0, 0, 0, 0]) for name in (*names, *more)}
    calls |= {
        "new user": (watched["unshare"], [CLONE_NEWUSER]),
        "typing": (watched["ioctl"], [0, 0x5412, 0]),
    }
    arguments = [program.hex(), json.dumps(calls)]
    done = subprocess.run(
        [sys.executable, "-c", _INSTALLED, *arguments], capture_output=True, text=True, check=True
    )
    results = json.loads(done.stdout)
    assert results.pop("program") == 0
    assert set(results.values()) == {errno.EPERM}, results
