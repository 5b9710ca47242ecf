"""Attacks that an agent may try from its sandbox, each run for real: what stops it is in the table of
``docs/sandboxes.md``, which is made from this list and checked against it.

What can't be stopped everywhere says which bound it takes (``needs``, a field of ``SandboxLimits`` in the
runtime's ``enforces``). What is not stopped at all is ``open``, with the reason: the check then expects it
to get through, so that the table can't say less, or more, than what holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollserve.testing import attack_scene as scenes
from rollserve.testing.attack_scene import EQUAL, PASSES, Try, carries, connect, perl, shell, syscall
from rollserve.testing.attacks_proxy import PROXY, PROXY_OPEN


@dataclass(frozen=True)
class Attack:
    """``stops`` says what stops it, or why nothing does; ``perl`` that the image must have one."""

    kind: str
    name: str
    tries: Try
    stops: str
    needs: str = ""
    open: bool = False
    perl: bool = False


NAMESPACES = "own namespaces and root file system"
NO_RIGHTS = "no capability, no user namespace inside, system call filter"
FILTER = "system call filter"
NO_NETWORK = "no network: only the sandbox's own loopback address"
FRESH = "graded in a fresh sandbox"
LINKS = "links that lead out of what is carried are left out"
MEMORY = "memory control group"

_FILES = (
    ("read a file of the host", "cat {secret} && echo through", NAMESPACES),
    ("read it through pid 1's root", "cat /proc/1/root{secret} && echo through", NAMESPACES),
    ("leave the root by `..`", "cat /../../..{secret} /tmp/../..{secret} && echo through", NAMESPACES),
    ("follow a symlink out", "ln -sf {secret} l; cat l && echo through", NAMESPACES),
    ("read `/etc/shadow`", "cat /etc/shadow && echo through", "an unprivileged user"),
)

_MOUNTS = (
    ("mount by the raw call", syscall(165, 40, '"none", "/tmp", "tmpfs", 0, 0'), NO_RIGHTS),
    ("unmount what covers the host", syscall(166, 39, '"/dev", 2'), NO_RIGHTS),
    (
        "uncover the sandbox's writable layer beneath `/proc`",
        syscall(166, 39, '"/proc", 2'),
        NO_RIGHTS,
    ),
    ("open a tree by `fsopen`", syscall(430, 430, '"tmpfs", 0'), FILTER),
    ("`chroot`", syscall(161, 51, '"/tmp"'), NO_RIGHTS),
    ("a new user namespace by `unshare`", syscall(272, 97, "0x10000000"), NO_RIGHTS),
    ("a new user namespace by `clone`", syscall(56, 220, "0x10000011, 0, 0, 0, 0"), NO_RIGHTS),
    (
        "enter pid 1's mount namespace",
        perl('open(F, "</proc/1/ns/mnt") or exit; got() if syscall(308, fileno(F), 0) != -1'),
        FILTER,
    ),
)

_PROC = (
    (
        "see the host's processes",
        "[ $(ls -d /proc/[0-9]* | wc -l) -gt 20 ] && echo through",
        "own pid namespace",
    ),
    (
        "write a kernel setting",
        "for f in sys/kernel/core_pattern sysrq-trigger; do echo b > /proc/$f && echo through; done",
        "an unprivileged user, `/proc/sys` read-only",
    ),
    (
        "read the environment of a process of the host",
        "grep -az . /proc/{victim}/environ && echo through",
        "own pid namespace",
    ),
    ("read the kernel's log", "dmesg >/dev/null 2>&1 && echo through", FILTER),
)

_DEVICES = (
    (
        "make a device node of the disk",
        "mknod /tmp/disk b 8 0 && echo through; mknod /tmp/mem c 1 1 && echo through",
        "no capability; all mounts `nodev`",
    ),
    (
        "open the machine's devices",
        "for d in sda vda mem kmsg kvm; do head -c 1 /dev/$d && echo through; done",
        "a `/dev` of its own",
    ),
)

_SETUID = (
    (
        "become root by a setuid program",
        "for p in su sudo newgrp; do echo | $p -c 'id -u' 2>/dev/null | grep -qx 0 && echo through; done",
        "`no_new_privs`, mounts `nosuid`",
    ),
    (
        "make a setuid program",
        "cp /usr/bin/id /tmp/id; chmod 6755 /tmp/id; "
        '[ "$(/tmp/id -u)" = 0 ] && [ "$(id -u)" != 0 ] && echo through',
        "own files only; `nosuid`",
    ),
)

_KERNEL = (
    ("load a program (`bpf`)", syscall(321, 280, "0, 0, 0")),
    (
        "`perf_event_open`",
        perl('$a = pack("LLQ16", 1, 112); got() if syscall(298, $a, 0, -1, -1, 0) != -1'),
    ),
    ("`userfaultfd`", syscall(323, 282, "1")),
    ("`io_uring_setup`", perl('$p = "\\0" x 120; got() if syscall(425, 1, $p) != -1')),
    ("the kernel's key rings (`add_key`)", syscall(248, 217, '"user", "a", "b", 1, -3')),
    (
        "`init_module`",
        perl('use Errno "EPERM"; $r = syscall(175, 0, 0, ""); got() if $r != -1 or $! != EPERM'),
    ),
)

_MEMORY = (
    (
        "more than allowed, over several processes",
        shell(
            "for i in 1 2 3 4 5 6 7 8; do "
            'perl -e \'$x = "x" x (50 << 20); print "ok\\n"; sleep 3\' & done | '
            "grep -c ok | awk '$1 > 5 { print \"through\" }'"
        ),
        MEMORY,
        "memory_mb",
    ),
    (
        "shared memory that belongs to no process",
        perl(
            "use IPC::SysV qw(IPC_PRIVATE IPC_CREAT); for (1 .. 5) { "
            "$id = shmget(IPC_PRIVATE, 60 << 20, IPC_CREAT | 0600) // exit; "
            'shmwrite($id, "x" x (60 << 20), 0, 60 << 20) or exit } got()'
        ),
        MEMORY,
        "memory_mb",
    ),
    (
        "a single process that takes too much",
        perl('$x = "x" x (300 << 20); got()'),
        "limit of each process, and of all",
        "",
    ),
    (
        "hundreds of thousands of empty files",
        perl('mkdir "/tmp/n"; for (1 .. 400000) { open(F, ">/tmp/n/$_") or exit } got()'),
        f"{MEMORY}: files without content are the kernel's memory, which is charged",
        "memory_mb",
    ),
)

_NETWORK = (
    (
        "reach the API, or another session, on the host's loopback address",
        connect("127.0.0.1", "{port}"),
        NO_NETWORK,
    ),
    (
        "reach an abstract socket of the host",
        perl(
            "use Socket; socket(S, PF_UNIX, SOCK_STREAM, 0); "
            'connect(S, pack("S a*", 1, "\\0{abstract}")) and got()'
        ),
        "own network namespace",
    ),
    ("reach the cloud's metadata address", connect("169.254.169.254", 80), NO_NETWORK),
    ("reach the outside", connect("1.1.1.1", 443), NO_NETWORK),
    (
        "send raw packets",
        perl("socket(S, 17, 3, 768) and got(); socket(S, 2, 3, 1) and got()"),
        "no capability",
    ),
    ("reach the hypervisor (`AF_VSOCK`)", perl("socket(S, 40, 1, 0) and got()"), FILTER),
)

_REWARD = (
    (
        "edit the tests",
        carries("echo 'exit 0' > tests/run", PASSES),
        f"{FRESH}; only named files are carried over",
    ),
    (
        "plant a program or profile that grading would run",
        carries(
            "echo 'exit 0' > ~/.profile; printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/sh; "
            "chmod +x /usr/local/bin/sh",
            PASSES,
        ),
        FRESH,
    ),
    (
        "hand over an archive with other files in it",
        carries(scenes.FAKE_TAR, PASSES),
        "only members that were asked for are unpacked",
    ),
    (
        "carry a symlink to the expected answer",
        carries(f"{scenes.OWN_EXPECTED}; ln -sf tests/expected answer", EQUAL),
        LINKS,
    ),
    (
        "the same by its whole path",
        carries(f"{scenes.OWN_EXPECTED}; ln -sf /workspace/tests/expected answer", EQUAL),
        LINKS,
    ),
    (
        "carry a hard link to the expected answer",
        carries(scenes.HARD_LINK_TAR, EQUAL),
        "unpacked in an empty folder first",
    ),
)

ATTACKS: tuple[Attack, ...] = (
    *(Attack("files", name, shell(command), stops) for name, command, stops in _FILES),
    Attack(
        "files",
        "read what everybody may read in the host's `/etc` (image `host`)",
        shell("[ -s /etc/passwd ] && echo through"),
        "the image `host` is the host's `/usr` and `/etc`; use another image where that matters",
        open=True,
    ),
    Attack("files", "change the host's `/usr` or `/etc`", scenes.changes_host, "private overlays"),
    Attack("mount", "mount a tmpfs", shell("mount -t tmpfs none /mnt && echo through"), NO_RIGHTS),
    *(Attack("mount", name, tries, stops, perl=True) for name, tries, stops in _MOUNTS),
    *(Attack("proc", name, shell(command), stops) for name, command, stops in _PROC),
    *(Attack("devices", name, shell(command), stops) for name, command, stops in _DEVICES),
    *(Attack("setuid", name, shell(command), stops) for name, command, stops in _SETUID),
    *(Attack("kernel", name, tries, FILTER, perl=True) for name, tries in _KERNEL),
    Attack(
        "kernel",
        "an unknown fault of the kernel",
        shell("echo through"),
        "the kernel is shared: a fault in what is let through leads out. Virtual machines are for that",
        open=True,
    ),
    Attack(
        "terminal",
        "type into a terminal (`TIOCSTI`)",
        perl(
            '$c = "x"; for ("/dev/stdin", "/dev/tty") { open(T, "<", $_) and ioctl(T, 0x5412, $c) and got() }'
        ),
        f"no controlling terminal; {FILTER}",
        perl=True,
    ),
    Attack("signals", "kill a process of the host", scenes.kill_host_process, "own pid namespace"),
    Attack(
        "ptrace",
        "attach to a process of the host",
        syscall(101, 117, "16, {victim}, 0, 0"),
        "own pid namespace",
        perl=True,
    ),
    Attack("fork bomb", "more processes than allowed", scenes.fork_bomb, "limit of processes", "processes"),
    *(Attack("memory", name, tries, stops, needs, perl=True) for name, tries, stops, needs in _MEMORY),
    Attack(
        "disk",
        "fill the disk with one file",
        shell("head -c 80000000 /dev/zero > /tmp/a && echo through"),
        "limit of a file's size",
    ),
    Attack(
        "disk",
        "fill the disk with many files, in the image too",
        shell(
            "n=0; for p in /tmp /usr /etc /workspace /dev/shm; do for i in 1 2 3; do "
            "head -c 10000000 /dev/zero > $p/f$i && n=$((n+1)); done; done; [ $n -gt 7 ] && echo through"
        ),
        "one tmpfs with a size under everything that can be written",
        "disk_mb",
    ),
    Attack(
        "disk", "fill `/dev`", shell("head -c 9 /dev/zero > /dev/fill && echo through"), "`/dev` read-only"
    ),
    Attack(
        "processor",
        "more processors than allowed",
        scenes.processor,
        "processor control group",
        "cpus",
        perl=True,
    ),
    Attack("output", "fifty megabytes of output", scenes.huge_output, "the middle is left out"),
    Attack(
        "output",
        "forge the answer to a command",
        scenes.forge_answer,
        "a nonce for each command, on a pipe that commands don't get",
    ),
    Attack(
        "daemons", "outlive the sandbox as a daemon or as zombies", scenes.outlive, "pid 1's end ends all"
    ),
    *(Attack("network", name, tries, stops, perl=True) for name, tries, stops in _NETWORK),
    Attack("network", "resolve a name", shell("getent hosts example.com && echo through"), NO_NETWORK),
    *(Attack("proxy", name, tries, stops, perl=True) for name, tries, stops in PROXY),
    *(Attack("proxy", name, tries, stops, perl=True, open=True) for name, tries, stops in PROXY_OPEN),
    Attack(
        "session",
        "reach the way to another sandbox's session",
        scenes.other_session,
        "it listens in that sandbox's network namespace; a session's way serves no other session",
        perl=True,
    ),
    *(Attack("reward", name, tries, stops) for name, tries, stops in _REWARD),
)


def table() -> str:
    """The table of ``docs/sandboxes.md``."""
    lines = ["| kind | attack | stopped | by what, or why not |", "| --- | --- | --- | --- |"]
    for attack in ATTACKS:
        stopped = "**no**" if attack.open else f"where `{attack.needs}` holds" if attack.needs else "yes"
        lines.append(f"| {attack.kind} | {attack.name} | {stopped} | {attack.stops} |")
    return "\n".join(lines)
