"""A listening socket inside a network namespace, handed out of it: no relay, and nothing the image brings.

A process can enter a network namespace only with the rights of the user namespace that owns it, and a
process with threads can't enter a user namespace: so a short-lived helper does it, as the sandbox's own
user, and passes the socket back. The socket stays in the sandbox's namespace wherever it is accepted.
"""

from __future__ import annotations

import socket
import subprocess
import sys

from rollserve.errors import SandboxError

HELPER_TIMEOUT_S = 20.0

_HELPER = """
import ctypes, fcntl, os, socket, sys
out, pid, uid = (int(word) for word in sys.argv[1:])
if uid != os.geteuid():
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
owner = fcntl.ioctl(network, 0xB701)  # NS_GET_USERNS: the user namespace that it belongs to
libc = ctypes.CDLL(None, use_errno=True)
for space in (owner, network):
    if libc.setns(space, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "setns")
listener = socket.create_server(("127.0.0.1", 0), backlog=128)
socket.send_fds(socket.socket(fileno=out), [b"1"], [listener.fileno()])
"""


def listen_inside(pid: int, *, uid: int) -> socket.socket:
    """A socket that listens on 127.0.0.1 in the network namespace of the process ``pid``, which runs as
    ``uid``; blocking, some 30 ms. Raises ``SandboxError``."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            arguments = [str(theirs.fileno()), str(pid), str(uid)]
            said = _run([sys.executable, "-I", "-S", "-c", _HELPER, *arguments], theirs.fileno())
        ours.setblocking(False)
        try:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        except BlockingIOError:
            fds = []
    if not fds:
        raise SandboxError(
            f"no socket can be opened inside the sandbox: {said}",
            operation="sandbox.listen",
            hint="entering a namespace of one's own must be allowed: setns, NS_GET_USERNS",
        )
    sock = socket.socket(fileno=fds[0])
    sock.set_inheritable(False)
    return sock


def _run(command: list[str], fd: int) -> str:
    """The last line the helper complained with; none when all went well."""
    try:
        done = subprocess.run(
            command,
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={},
            timeout=HELPER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
