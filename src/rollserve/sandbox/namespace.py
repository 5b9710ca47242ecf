"""Sockets of a network namespace, handed out of it: no relay, and nothing the image brings.

A process can enter a network namespace only with the rights of the user namespace that owns it, and a
process with threads can't enter a user namespace: so a short-lived helper does it, as the sandbox's own
user, and passes the sockets back. A socket stays in the sandbox's namespace wherever it is accepted, or
connected.
"""

from __future__ import annotations

import socket
import subprocess
import sys

from rollserve.errors import SandboxError

HELPER_TIMEOUT_S = 20.0

_HELPER = """
import ctypes, fcntl, os, socket, sys
out, pid, uid, count = (int(word) for word in sys.argv[1:])
if uid != os.geteuid():
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
owner = fcntl.ioctl(network, 0xB701)  # NS_GET_USERNS: the user namespace that it belongs to
libc = ctypes.CDLL(None, use_errno=True)
own = os.stat("/proc/self/ns/user")
for space in (owner, network):
    if os.path.samestat(os.fstat(space), own):
        continue  # where it is already, as root is in that of a rootful engine
    if libc.setns(space, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "setns")
made = [socket.socket() for _ in range(count)] or [socket.create_server(("127.0.0.1", 0), backlog=128)]
socket.send_fds(socket.socket(fileno=out), [b"1"], [sock.fileno() for sock in made])
"""


def listen_inside(pid: int, *, uid: int) -> socket.socket:
    """A socket that listens on 127.0.0.1 in the network namespace of the process ``pid``, which runs as
    ``uid``; blocking, some 30 ms. Raises ``SandboxError``."""
    return _fetch(pid, uid, 0)[0]


def sockets_inside(pid: int, *, uid: int, count: int) -> list[socket.socket]:
    """TCP sockets of that namespace, not connected yet; likewise. Connect them from here."""
    return _fetch(pid, uid, count)


def _fetch(pid: int, uid: int, count: int) -> list[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            arguments = [str(theirs.fileno()), str(pid), str(uid), str(count)]
            command = [sys.executable, "-I", "-S", "-c", _HELPER, *arguments]
            said = run_helper(command, fd=theirs.fileno(), timeout_s=HELPER_TIMEOUT_S)
        ours.setblocking(False)
        try:
            _, fds, _, _ = socket.recv_fds(ours, 1, max(1, count))
        except BlockingIOError:
            fds = []
    if not fds:
        raise SandboxError(
            f"no socket can be opened inside the sandbox: {said}",
            operation="sandbox.listen" if count == 0 else "sandbox.connect",
            hint="entering a namespace of one's own must be allowed: setns, NS_GET_USERNS",
        )
    made = [socket.socket(fileno=fd) for fd in fds]
    for sock in made:
        sock.set_inheritable(False)
    return made


def run_helper(command: list[str], *, fd: int, timeout_s: float) -> str | None:
    """Run a program that keeps ``fd``; the last line it complained with, None when all went well."""
    try:
        done = subprocess.run(
            command,
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={},
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
