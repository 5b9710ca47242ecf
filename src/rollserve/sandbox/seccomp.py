"""The seccomp filter of a sandbox: system calls that open more of the kernel than an agent's work needs.

A list of what is refused, after what container engines refuse by default to a process without
capabilities; all else is let through. Refused calls fail with an error and kill nobody. A call that is
not of the machine's own kind (32-bit, x32) fails with ``ENOSYS``, as does ``clone3``, whose flags lie
where no filter can look: C libraries then use ``clone``. Debuggers work: ``ptrace`` stays, and reaches
only what is in the sandbox's own pid namespace.

The program is classic BPF over ``struct seccomp_data`` (linux/seccomp.h), assembled here: no kept
library brings an assembler, and this one needs four instructions.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Iterable
from types import MappingProxyType

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH = 0, 4
_X32_BIT = 0x40000000

_NEW_NAMESPACES = 0x7E020000
"""``CLONE_NEW*`` but ``CLONE_NEWTIME``, whose bit ``clone`` reads as part of a signal."""

_NEW_TIME = 0x80
_TERMINAL_INPUT = (0x5412, 0x541C)
"""``TIOCSTI``, ``TIOCLINUX``: they type into a terminal."""

_FAMILIES = (15, 38, 40, 44)
"""Sockets of keys, kernel cryptography, the machine's hypervisor (which no namespace holds), XDP."""

_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)

ARCHES = MappingProxyType({"x86_64": 0xC000003E, "aarch64": 0xC00000B7})
"""``AUDIT_ARCH_*`` by what ``uname -m`` says."""

_EVERYWHERE = MappingProxyType(
    {
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        "open_tree": 428,
        "move_mount": 429,
        "fsopen": 430,
        "fsconfig": 431,
        "fsmount": 432,
        "fspick": 433,
        "mount_setattr": 442,
        "quotactl_fd": 443,
        "open_tree_attr": 467,
    }
)

REFUSED = MappingProxyType(
    {
        "x86_64": {
            **_EVERYWHERE,
            "syslog": 103,
            "uselib": 134,
            "ustat": 136,
            "sysfs": 139,
            "vhangup": 153,
            "pivot_root": 155,
            "_sysctl": 156,
            "chroot": 161,
            "acct": 163,
            "settimeofday": 164,
            "mount": 165,
            "umount2": 166,
            "swapon": 167,
            "swapoff": 168,
            "reboot": 169,
            "iopl": 172,
            "ioperm": 173,
            "create_module": 174,
            "init_module": 175,
            "delete_module": 176,
            "get_kernel_syms": 177,
            "query_module": 178,
            "quotactl": 179,
            "nfsservctl": 180,
            "lookup_dcookie": 212,
            "clock_settime": 227,
            "kexec_load": 246,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "perf_event_open": 298,
            "fanotify_init": 300,
            "name_to_handle_at": 303,
            "open_by_handle_at": 304,
            "clock_adjtime": 305,
            "setns": 308,
            "finit_module": 313,
            "kexec_file_load": 320,
            "bpf": 321,
            "userfaultfd": 323,
        },
        "aarch64": {
            **_EVERYWHERE,
            "lookup_dcookie": 18,
            "umount2": 39,
            "mount": 40,
            "pivot_root": 41,
            "nfsservctl": 42,
            "chroot": 51,
            "vhangup": 58,
            "quotactl": 60,
            "acct": 89,
            "kexec_load": 104,
            "init_module": 105,
            "delete_module": 106,
            "clock_settime": 112,
            "syslog": 116,
            "reboot": 142,
            "settimeofday": 170,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "swapon": 224,
            "swapoff": 225,
            "perf_event_open": 241,
            "fanotify_init": 262,
            "name_to_handle_at": 264,
            "open_by_handle_at": 265,
            "clock_adjtime": 266,
            "setns": 268,
            "finit_module": 273,
            "bpf": 280,
            "userfaultfd": 282,
            "kexec_file_load": 294,
        },
    }
)
"""Refused with ``EPERM`` whatever their arguments: numbers by name, by machine."""

WATCHED = MappingProxyType(
    {
        "x86_64": {"ioctl": 16, "socket": 41, "clone": 56, "personality": 135, "unshare": 272, "clone3": 435},
        "aarch64": {
            "ioctl": 29,
            "socket": 198,
            "clone": 220,
            "personality": 92,
            "unshare": 97,
            "clone3": 435,
        },
    }
)
"""Refused by their arguments, ``clone3`` always."""


class _Assembler:
    """Instructions with jumps to labels; a jump that is not taken goes on with the next one."""

    def __init__(self) -> None:
        self._code: list[tuple[int, int, str, str]] = []
        self._labels: dict[str, int] = {}

    def load(self, offset: int) -> None:
        self._code.append((_LOAD, offset, "", ""))

    def jump(self, test: int, value: int, *, then: str = "", otherwise: str = "") -> None:
        self._code.append((test, value, then, otherwise))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def give(self, name: str, value: int) -> None:
        self.label(name)
        self._code.append((_RETURN, value, "", ""))

    def program(self) -> bytes:
        parts = []
        for place, (code, value, then, otherwise) in enumerate(self._code):
            jumps = (self._labels[name] - place - 1 if name else 0 for name in (then, otherwise))
            parts.append(struct.pack("<HBBI", code, *jumps, value))
        return b"".join(parts)


def filter_program(machine: str | None = None) -> bytes | None:
    """Of a machine as ``uname -m`` names it, by default this one; ``None`` for one that is not known."""
    machine = machine or platform.machine()
    if machine not in ARCHES:
        return None
    assembler, watched = _Assembler(), WATCHED[machine]
    assembler.load(_ARCH)
    assembler.jump(_JUMP_EQUAL, ARCHES[machine], otherwise="no such call")
    assembler.load(_NUMBER)
    if machine == "x86_64":
        assembler.jump(_JUMP_ABOVE, _X32_BIT, then="no such call")
    for number in sorted(REFUSED[machine].values()):
        assembler.jump(_JUMP_EQUAL, number, then="refused")
    for name, number in watched.items():
        assembler.jump(_JUMP_EQUAL, number, then="no such call" if name == "clone3" else name)
    assembler.give("allowed", _ALLOW)
    _check_arguments(assembler)
    assembler.give("let through", _ALLOW)
    assembler.give("refused", _ERRNO | errno.EPERM)
    assembler.give("no such call", _ERRNO | errno.ENOSYS)
    assembler.give("no such family", _ERRNO | errno.EAFNOSUPPORT)
    return assembler.program()


def _check_arguments(assembler: _Assembler) -> None:
    """The low halves: the kernel reads no more of these."""
    for name, argument, test, values, then in (
        ("clone", 0, _JUMP_ANY_BIT, (_NEW_NAMESPACES,), "refused"),
        ("unshare", 0, _JUMP_ANY_BIT, (_NEW_NAMESPACES | _NEW_TIME,), "refused"),
        ("ioctl", 1, _JUMP_EQUAL, _TERMINAL_INPUT, "refused"),
        ("socket", 0, _JUMP_EQUAL, _FAMILIES, "no such family"),
    ):
        assembler.label(name)
        assembler.load(_argument(argument))
        _jump_each(assembler, test, values, then)
        assembler.give(f"{name} allowed", _ALLOW)
    assembler.label("personality")
    assembler.load(_argument(0))
    _jump_each(assembler, _JUMP_EQUAL, _PERSONALITIES, "let through")
    assembler.give("personality refused", _ERRNO | errno.EPERM)


def _jump_each(assembler: _Assembler, test: int, values: Iterable[int], then: str) -> None:
    for value in values:
        assembler.jump(test, value, then=then)


def _argument(index: int) -> int:
    return 16 + 8 * index


class Filter:
    """The filter of this machine in memory, for ``bwrap --seccomp``. ``opened`` gives a descriptor of its
    own to each start: they share no reading position. Nothing where the machine is not known."""

    def __init__(self) -> None:
        program = filter_program()
        self._memory = -1
        if program is not None:
            self._memory = os.memfd_create("rollserve-seccomp")
            os.write(self._memory, program)

    @property
    def exists(self) -> bool:
        return self._memory >= 0

    def opened(self) -> int:
        return os.open(f"/proc/self/fd/{self._memory}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        memory, self._memory = self._memory, -1
        if memory >= 0:
            os.close(memory)
